import math

import pytest
import torch
from pytest import approx

from megatron_agentrl.algorithm.advantages import group_advantages
from megatron_agentrl.recipe.schema import Advantage, Algorithm, Correction, Proximal
from megatron_agentrl.trainer.batch import MicroBatch, rl_micro_batch, sft_micro_batch
from megatron_agentrl.trainer.losses import rl_loss, sft_loss
from megatron_agentrl.trajectory.types import Segment, Trajectory


def segment(prompt: int, versions: list[int], first_id: int = 10) -> Segment:
    """A row of `prompt` context tokens and one sampled token per version (-1: a tool's token)."""
    mask = [0] * prompt + [int(v >= 0) for v in versions]
    ids = list(range(first_id, first_id + len(mask)))
    return Segment(ids, mask, [-0.5 * m for m in mask], [-1] * prompt + versions)


def trajectory(*segments: Segment, reward: float = 1.0) -> Trajectory:
    return Trajectory("r0", "t0", 0, list(segments), "ok", reward, "engine-0")


def mask_of(batch: MicroBatch) -> list[list[int]]:
    return batch.columns["mask"].int().tolist()


# S04: version stamps per token


def test_only_tokens_young_enough_are_trained_and_the_others_stay_as_context():
    rows = [(trajectory(segment(2, [7] * 6 + [8] * 4)), 0.5)]
    batch = rl_micro_batch(rows, pad_id=0, version=9, eta=1)
    assert mask_of(batch) == [[0] * 8 + [1] * 4]
    assert batch.tokens == 4
    assert batch.ids_BT.tolist() == [list(range(10, 22))]
    assert batch.columns["behaviour_logprobs"].tolist() == [[0.0] * 8 + [-0.5] * 4]
    assert batch.columns["advantages"].tolist() == [[0.0] * 8 + [0.5] * 4]
    assert rl_micro_batch(rows, pad_id=0, version=9, eta=2).tokens == 10


def test_an_answer_resumed_twice_trains_what_is_within_eta():
    rows = [(trajectory(segment(1, [3] * 3 + [5] + [6] * 6)), 1.0)]
    assert mask_of(rl_micro_batch(rows, pad_id=0, version=6, eta=2)) == [[0] * 4 + [1] * 7]


def test_tokens_of_a_later_version_than_the_step_starts_from_are_not_trained():
    assert mask_of(rl_micro_batch([(trajectory(segment(1, [4, 5])), 1.0)], 0, version=4, eta=1)) == [[0, 1, 0]]


def test_three_turns_with_tool_replies_train_the_actions_only():
    turns = [1] * 3 + [-1] * 4 + [1] * 2 + [-1] * 3 + [1] * 2
    batch = rl_micro_batch([(trajectory(segment(5, turns)), 1.0)], 0, version=1, eta=0)
    assert batch.ids_BT.shape == (1, 19)
    assert batch.columns["mask"][0].nonzero().flatten().tolist() == [5, 6, 7, 12, 13, 17, 18]


def test_rows_of_unequal_length_are_padded_and_both_segments_carry_the_advantage():
    a = trajectory(segment(2, [1, 1]), segment(3, [1], first_id=50))
    b = trajectory(segment(1, [1]), reward=0.0)
    advantages = group_advantages(Advantage.grpo, [1.0, 0.0])
    batch = rl_micro_batch([(a, advantages[0]), (b, advantages[1])], pad_id=99, version=1, eta=0)
    assert batch.ids_BT.tolist() == [[10, 11, 12, 13], [50, 51, 52, 53], [10, 11, 99, 99]]
    assert batch.lengths_B.tolist() == [4, 4, 2]
    assert batch.columns["advantages"].sum(-1).tolist() == approx([2 * 0.707107, 0.707107, -0.707107], abs=1e-6)


def test_rows_without_a_trained_token_are_left_out_and_no_rows_make_an_empty_batch():
    for rows in ([], [(trajectory(segment(2, [1, 1])), 1.0)]):
        batch = rl_micro_batch(rows, pad_id=0, version=9, eta=1)
        assert batch.ids_BT.shape == (0, 0) and batch.lengths_B.tolist() == []
        assert batch.tokens == 0 and batch.columns["advantages"].shape == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [0.0, 0.0, math.nan]}, "trajectory r0, segment 0: the engine's logprob at token 2 is nan"),
        ({"logprobs": [0.0, 0.0]}, r"columns have lengths \[2, 3\]"),
        ({"loss_mask": [1, 0, 1]}, "first token is marked as sampled"),
    ],
)
def test_a_broken_segment_is_refused_by_name(change, message):
    broken = segment(2, [1])
    for name, value in change.items():
        setattr(broken, name, value)
    with pytest.raises(ValueError, match=message):
        rl_micro_batch([(trajectory(broken), 1.0)], 0, version=1, eta=0)


def test_supervised_rows_keep_their_mask_except_at_the_first_token():
    batch = sft_micro_batch([([5, 6, 7], [1, 0, 1]), ([8], [1]), ([], [])], pad_id=0)
    assert batch.ids_BT.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert mask_of(batch) == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert batch.lengths_B.tolist() == [3, 1, 0]
    with pytest.raises(ValueError, match="row 0 has 2 ids and 1 mask values"):
        sft_micro_batch([([5, 6], [1])], pad_id=0)


# Losses


def batch_of(behaviour, advantages, mask=None, **columns) -> MicroBatch:
    behaviour = torch.tensor([behaviour])
    found = {
        "mask": torch.tensor([mask or [1.0] * behaviour.shape[1]]),
        "behaviour_logprobs": behaviour,
        "advantages": torch.tensor([advantages]),
    }
    found |= {name: torch.tensor([values]) for name, values in columns.items()}
    return MicroBatch(torch.zeros_like(behaviour, dtype=torch.int64), torch.tensor([behaviour.shape[1]]), found)


def test_the_behaviour_loss_is_the_clipped_sum_with_its_metrics():
    batch = batch_of([0.0, 0.0, 0.0, 0.0, 9.0], [1.0, 1.0, -1.0, -1.0, 5.0], mask=[1.0, 1.0, 1.0, 1.0, 0.0])
    loss, metrics = rl_loss(Algorithm())(torch.tensor([[0.1, 0.4, -0.3, 0.0, -3.0]]), batch)
    assert loss.item() == approx(4 * -0.146293, abs=1e-5)
    assert {name: value.item() for name, value in metrics.items()} == approx(
        {
            "tokens": 4.0,
            "logprob_gap": 0.8,
            "max/logprob_gap": 0.4,
            "ratio": math.exp(0.1) + math.exp(0.4) + math.exp(-0.3) + 1.0,
            "clipped": 2.0,
            "clamped": 0.0,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(("correction", "mean"), [(Correction.mask, -0.745248), (Correction.truncate, -1.120248)])
def test_the_recomputed_loss_weighs_tokens_by_trainer_over_engine(correction, mean):
    algorithm = Algorithm(proximal=Proximal.recomputed, importance_cap=1.5, importance_floor=0.5, correction=correction)
    old = [-1.0, -1.0, -1.0, -1.0]
    batch = batch_of([-1.0, -1.02, -0.96, -1.6], [1.0] * 4, old=old)
    loss, metrics = rl_loss(algorithm)(torch.tensor([old]), batch)
    assert loss.item() / 4 == approx(mean, abs=1e-6)
    assert metrics["importance_outside"].item() == 1.0
    without_old, _ = rl_loss(algorithm)(torch.tensor([old]), batch_of([-1.0, -1.02, -0.96, -1.6], [1.0] * 4))
    assert without_old.item() == approx(loss.item())


def test_the_recomputed_ratio_is_taken_against_the_start_of_the_step_not_the_engine():
    batch = batch_of([-2.0], [1.0], old=[-1.0])
    logprobs = torch.tensor([[-0.9]], requires_grad=True)
    loss, _ = rl_loss(Algorithm(proximal=Proximal.recomputed, importance_cap=2.0))(logprobs, batch)
    loss.backward()
    assert loss.item() == approx(-2.0 * math.exp(0.1), abs=1e-6)
    assert logprobs.grad.item() == approx(-2.0 * math.exp(0.1), abs=1e-6)


def test_kl_to_the_reference_is_added_and_its_column_is_required():
    algorithm = Algorithm(kl_coef=0.5)
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, metrics = rl_loss(algorithm)(logprobs, batch_of([-1.0, -1.0], [0.0, 0.0], reference=[-1.2, -0.5]))
    loss.backward()
    assert metrics["kl"].item() == approx(0.018731 + 0.148721, abs=1e-6)
    assert loss.item() == approx(0.5 * (0.018731 + 0.148721), abs=1e-6)
    assert logprobs.grad.tolist()[0] == approx([0.5 * (1 - math.exp(-0.2)), 0.5 * (1 - math.exp(0.5))], abs=1e-6)
    with pytest.raises(KeyError, match="reference"):
        rl_loss(algorithm)(logprobs, batch_of([-1.0, -1.0], [0.0, 0.0]))


def test_gradient_does_not_depend_on_how_rows_are_cut_into_micro_batches():
    torch.manual_seed(0)
    rows = [
        (trajectory(segment(2, [1] * n)), a)
        for n, a in ((5, 1.0), (2, -0.3), (7, 0.2), (1, -1.1), (3, 0.0))
    ]  # fmt: skip
    whole = rl_micro_batch(rows, 0, 1, 0)
    values = -torch.rand(whole.ids_BT.shape)

    def gradient(parts):
        theta = torch.tensor(1.0, requires_grad=True)
        at, total = 0, 0.0
        for part in parts:
            batch = rl_micro_batch(part, 0, 1, 0)
            b, t = batch.ids_BT.shape
            total = total + rl_loss(Algorithm())(values[at : at + b, :t] * theta, batch)[0]
            at += b
        (total / whole.tokens).backward()
        return theta.grad.item()

    assert gradient([rows]) == approx(gradient([rows[:1], rows[1:4], rows[4:]]), rel=1e-6)
    assert gradient([rows]) == approx(gradient([[row] for row in rows]), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"importance_floor": 3.0}, "importance_floor=3.0 and importance_cap=2.0"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        rl_loss(Algorithm(**values))


def test_supervised_loss_is_the_cross_entropy_of_trained_tokens():
    batch = sft_micro_batch([([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1])], pad_id=0)
    loss, metrics = sft_loss(torch.tensor([[0.0, -9.0, -1.5], [0.0, -0.25, -9.0]]), batch)
    assert loss.item() == 1.75
    assert metrics["tokens"].item() == 2.0 and metrics["cross_entropy"].item() == 1.75
