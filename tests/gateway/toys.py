"""Toy policies: alphabets whose ids are easy to read, and the templates of the literal cases."""

import json
from dataclasses import dataclass
from pathlib import Path

from examples.calculator.make_model import byte_alphabet
from megatron_agentrl.chat.parse import ReplyParser
from megatron_agentrl.chat.sampling import SamplingContract
from megatron_agentrl.chat.template import ChatTemplate
from megatron_agentrl.chat.tokenizer import Tokenizer
from megatron_agentrl.gateway.session import Policy, Session

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator" / "model"

CHATML = (
    "{% for m in messages %}<user>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)


@dataclass
class EngineSays:
    """An engine's reply."""

    ids: list[int]
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    finish_reason: str = "stop"
    engine: str = "engine-0"

    def __post_init__(self):
        if self.logprobs is None:
            self.logprobs = [-0.25 - n / 8 for n in range(len(self.ids))]
        if self.versions is None:
            self.versions = [7] * len(self.ids)


def c(*ids: int) -> str:
    """The text of ids in the alphabet of `letters`: one character per id."""
    return "".join(chr(0x4E00 + id) for id in ids)


def letters(
    folder: Path, special: list[int], stop: list[int], template: str, response_template=None, size=100
) -> Policy:
    """A policy whose ids 0..size-1 are single characters."""
    added = [
        {
            "id": n,
            "content": c(n),
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for n in special
    ]
    return policy(
        folder, {c(n): n for n in range(size)}, [], added, {"type": "Fuse"}, None, stop, template, response_template
    )


def policy(folder, vocab, merges, added, decoder, pre_tokenizer, stop, template, response_template=None) -> Policy:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    whole |= {"pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    tokenizer = Tokenizer(folder)
    return Policy(tokenizer, ChatTemplate(template), ReplyParser(tokenizer, response_template))


def bytes_with_halved_emoji(folder: Path, template: str) -> Policy:
    """Bytes 0-255; F0 9F is token 256 and 98 80 token 257; 258 ends a turn."""
    alphabet = byte_alphabet()
    halves = [(alphabet[0xF0], alphabet[0x9F]), (alphabet[0x98], alphabet[0x80])]
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    vocab |= {left + right: 256 + n for n, (left, right) in enumerate(halves)}
    end = {
        "id": 258,
        "content": "<end>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return policy(folder, vocab, [list(pair) for pair in halves], [end], level, level, [258], template)


def calculator_policy() -> Policy:
    tokenizer = Tokenizer(CALCULATOR)
    return Policy(tokenizer, ChatTemplate.from_folder(CALCULATOR), ReplyParser(tokenizer))


def chatml_policy() -> Policy:
    """The calculator's byte alphabet under a ChatML-like template: <user>role\\n…<eos>\\n, JSON calls, dropped reasoning."""
    tokenizer = Tokenizer(CALCULATOR)
    spec = {
        "start_anchor": "<user>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "f", "arguments": "{content}"}},
            },
            "content": {"close": "<eos>"},
        },
    }
    return Policy(tokenizer, ChatTemplate(CHATML), ReplyParser(tokenizer, spec))


def session(policy: Policy, max_tokens=1000, max_response_tokens=100_000, context_length=100_000, **more) -> Session:
    return Session(policy, SamplingContract(1.0, max_tokens, max_response_tokens, context_length, **more))


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def ask(session: Session, messages: list[dict], says: EngineSays, **request) -> tuple[list[int], dict]:
    """One request answered by `says`: (prompt ids the engine was given, assistant message the agent gets)."""
    pending = session.plan({"messages": messages, "model": "policy", **request})
    completion = session.commit(pending, says)
    return pending.prompt_ids, completion.reply.wire()


def rows(session: Session):
    return session.trajectory("r", "t", 0, "ok", 1.0, {}).segments
