"""Logprobs and entropy by chunks against plain log_softmax: values, gradients, tensor-parallel shares and memory."""

import json
import math

import logprob_worker
import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_agentrl.trainer.logprobs import token_logprobs, token_logprobs_and_entropy


def plain(logits, ids, temperature, vocab_size):
    """The definition: (logprobs, entropy) with every column and token at once, through autograd."""
    log_p = (logits.float() / temperature)[..., :vocab_size].log_softmax(-1)
    return log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def drawn(rows, positions, columns, vocab, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, positions, columns, generator=generator)).to(dtype)
    ids = torch.randint(0, vocab, (rows, positions), generator=generator)
    return logits, ids, torch.randn(rows, positions, generator=generator)


def with_gradient(function, logits, weights_BT):
    """(values, gradient of their weighted sum); `weights_BT` holds one weighting for each value."""
    leaf = logits.detach().clone().requires_grad_()
    values = function(leaf)
    sum((value * weight).sum() for value, weight in zip(values, weights_BT, strict=True)).backward()
    return values, leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 10, 57, 1024])
def test_logprobs_of_one_process_equal_log_softmax_to_the_last_bit(dtype, temperature, chunk):
    logits, ids, weight = drawn(3, 19, 320, 272, dtype)
    want, want_gradient = with_gradient(lambda z: [plain(z, ids, temperature, 272)[0]], logits, [weight])
    got, gradient = with_gradient(lambda z: [token_logprobs(z, ids, temperature, 272, None, chunk)], logits, [weight])
    assert torch.equal(got[0], want[0])
    assert torch.equal(gradient, want_gradient) and gradient.dtype == dtype


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    positions=st.integers(1, 9),
    vocab=st.integers(2, 140),
    padding=st.integers(0, 70),
    chunk=st.integers(1, 40),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 2**16),
)
def test_values_and_gradients_are_the_definitions_for_any_shape_and_chunk(
    rows, positions, vocab, padding, chunk, temperature, seed
):
    logits, ids, weight = drawn(rows, positions, vocab + padding, vocab, seed=seed)
    logits[..., vocab:] = 1e4  # a padding column that counted would swallow the softmax
    weights = [weight, weight.flip(0) * 0.3]
    want, want_gradient = with_gradient(lambda z: plain(z, ids, temperature, vocab), logits, weights)
    got, gradient = with_gradient(
        lambda z: token_logprobs_and_entropy(z, ids, temperature, vocab, None, chunk), logits, weights
    )
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=2e-6)
    assert gradient[..., vocab:].count_nonzero() == 0


def test_entropy_of_equal_logits_is_the_logarithm_of_the_vocabulary_and_of_a_certain_choice_zero():
    logits = torch.zeros(1, 2, 128)
    logits[0, 1, 7] = 200.0
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([[100, 7]]), 1.0, 101)
    assert entropy.tolist()[0] == pytest.approx([math.log(101), 0.0], abs=1e-6)
    assert logprobs.tolist()[0] == pytest.approx([-math.log(101), 0.0], abs=1e-6)


def test_logits_that_are_a_slice_of_more_positions_get_their_gradient():
    logits, ids, weight = drawn(3, 8, 64, 50)
    ids, weight = ids[:, :6], weight[:, :6]
    want, want_gradient = with_gradient(lambda z: [plain(z[:, :6], ids, 1.0, 50)[0]], logits, [weight])
    got, gradient = with_gradient(lambda z: [token_logprobs(z[:, :6], ids, 1.0, 50, None, 4)], logits, [weight])
    assert torch.equal(got[0], want[0]) and torch.equal(gradient, want_gradient)


def test_a_chunk_without_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0: expected at least one token"):
        token_logprobs(torch.zeros(1, 1, 4), torch.tensor([[0]]), 1.0, 4, None, 0)


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """What each of three processes found for each case."""
    folder = tmp_path_factory.mktemp("shares")
    processes.run("logprob_worker.py", 3, folder, str(folder), deadline=120)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("index", range(len(logprob_worker.CASES)))
def test_every_share_of_the_vocabulary_gives_the_whole_vocabularys_values_and_gradients(shares, index):
    for rank in range(logprob_worker.CASES[index][0]):
        found = shares[rank][index]
        assert found.pop("padding") == 0.0
        assert max(found.values()) < 4e-6, found  # logits reach 16: one unit in their last place is 1e-6


class LiveFloat32(TorchDispatchMode):
    """The largest number of float32 bytes that lay in memory at once, of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.dtype == torch.float32:
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_float32_stays_within_three_chunks_however_many_tokens_there_are(entropy):
    vocab, chunk, budget = 1000, 8, 3 * 8 * 1000 * 4
    peaks = []
    for tokens in (64, 512):
        logits, ids, weight = drawn(1, tokens, 1024, vocab, torch.bfloat16)
        logits.requires_grad_()
        with LiveFloat32() as seen:
            function = token_logprobs_and_entropy if entropy else lambda *given: [token_logprobs(*given)]
            values = function(logits, ids, 1.0, vocab, None, chunk)
            sum((value * weight).sum() for value in values).backward()
        by_token = 12 * tokens * 4  # logprobs, entropies, their gradients and weights: a number a token each
        assert 2 * chunk * vocab * 4 < seen.peak < budget + by_token
        peaks.append(seen.peak - by_token)
    assert abs(peaks[1] - peaks[0]) < chunk * vocab * 4


def test_the_same_measure_sees_the_whole_softmax_of_the_plain_definition():
    logits, ids, weight = drawn(1, 512, 1024, 1000, torch.bfloat16)
    logits.requires_grad_()
    with LiveFloat32() as seen:
        (plain(logits, ids, 1.0, 1000)[0] * weight).sum().backward()
    assert seen.peak > 512 * 1000 * 4
