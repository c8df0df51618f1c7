"""One agent run's conversation(s) as exact token rows: the logic of the gateway, without I/O.

A session turns chat requests into prompts of token ids and engine replies into rows that can be
trained on. It keeps one invariant: the ids before each sampled token are the ids the engine was
given, and each sampled token stands in exactly one row with mask 1. Nothing here waits, and nothing
is ever re-encoded from sampled text.

How a request finds its row. The longest part of the incoming history that equals a conversation this
session has answered (tools, roles, contents, tool calls) names the turn it continues. Its stored ids
are the context; only what the template writes after that turn is encoded (`_suffix`). A row begins
anew, with a reason that is counted, when
  history    the history is not one this session has answered (an edit, a compaction, a sub-agent);
  branch     the turn was already continued by another request;
  template   the template writes the earlier turns differently now (it drops old reasoning, say).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from megatron_agentrl.chat.parse import Reply, ReplyParser
from megatron_agentrl.chat.sampling import SamplingContract, turn_sampling
from megatron_agentrl.chat.template import ChatTemplate, template_messages
from megatron_agentrl.chat.tokenizer import Tokenizer
from megatron_agentrl.trajectory.types import NOT_SAMPLED, Segment, Trajectory

ROLES = ("system", "developer", "user", "assistant", "tool")


class RequestRefused(ValueError):
    """The chat request cannot be served as it stands; the message says why."""


class EngineReplyError(RuntimeError):
    """The engine's reply cannot be recorded exactly, so nothing of it is."""


class EngineReply(Protocol):
    """What an engine returns for one request; all columns have the length of `ids`."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    engine: str


@dataclass(frozen=True)
class Policy:
    """What a session needs to know of the model: its tokenizer, chat template and reply parser."""

    tokenizer: Tokenizer
    template: ChatTemplate
    parser: ReplyParser


@dataclass
class _Row:
    """A segment in the making."""

    split_reason: str | None
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    tip: _Turn | None = None
    claimed: bool = False

    def add_context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [NOT_SAMPLED] * len(ids)

    def add_sampled(self, reply: EngineReply) -> None:
        start = len(self.ids)
        self.ids += reply.ids
        self.mask += [1] * len(reply.ids)
        self.logprobs += reply.logprobs
        self.versions += reply.versions
        self.turns.append((start, len(self.ids)))
        self.finish_reasons.append(reply.finish_reason)


@dataclass(eq=False)
class _Turn:
    """An answered turn: where its ids end, and the texts that prompt and sampled ids stand for."""

    row: _Row
    end: int
    prompt_text: str
    sampled_text: str
    reasoning: str | None
    #: The history up to and including the reply, as the template is given it.
    messages: list[dict[str, Any]]


@dataclass(eq=False)
class PendingTurn:
    """A planned request: what the engine is to be asked. Ends in exactly one `commit` or `abandon`.

    prompt_ids   ids the engine is given
    max_tokens   tokens it may sample; 0 means that a budget is used up and no engine is asked
    temperature  sampling temperature
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    budget_bound: bool
    split_reason: str | None
    row: _Row | None
    suffix_ids: list[int]
    prompt_text: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    digest: bytes
    open: bool = True


@dataclass(frozen=True)
class Completion:
    """The answer to one request: the parsed reply, why it ended, and its token counts."""

    reply: Reply
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int

    @property
    def wire_finish_reason(self) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if self.reply.tool_calls and self.finish_reason == "stop" else self.finish_reason


class Session:
    """All rows of one rollout. Requests may overlap: `plan` claims, `commit` or `abandon` settles."""

    def __init__(self, policy: Policy, contract: SamplingContract) -> None:
        self._policy = policy
        self.contract = contract
        self.over_length = False
        self.sampled_tokens = 0
        self.engines: list[str] = []
        self._reserved = 0
        self._rows: list[_Row] = []
        self._turns: dict[bytes, _Turn] = {}
        self._asked: Counter[bytes] = Counter()

    @property
    def splits(self) -> list[str]:
        """Why each row after the first began."""
        return [row.split_reason for row in self._rows if row.split_reason is not None]

    def plan(self, request: dict[str, Any]) -> PendingTurn:
        """What to ask the engine for one chat-completions request.

        Raises RequestRefused, SamplingRefused or TemplateError; the session is then as before.
        """
        sampling = turn_sampling(request, self.contract)
        messages, tools = request.get("messages"), request.get("tools") or None
        if not isinstance(messages, list) or not messages:
            raise RequestRefused("messages: expected a list of at least one message")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise RequestRefused("tools: expected a list of objects")
        messages = [_checked(index, message) for index, message in enumerate(messages)]
        names = request.get("chat_template_kwargs") or {}
        if not isinstance(names, dict) or {"messages", "tools", "add_generation_prompt"} & set(names):
            raise RequestRefused("chat_template_kwargs: expected an object that leaves messages and tools alone")

        digests = _digests(messages, tools, names)
        turn, known = self._answered(messages, digests)
        shaped = (turn.messages if turn else []) + template_messages(messages[known:])
        render = self._policy.template.render
        prompt_text = render(shaped, tools, add_generation_prompt=True, **names)
        suffix = None
        if turn is not None:
            suffix = self._suffix(turn, prompt_text, lambda: render(turn.messages, tools, **names))

        row: _Row | None = None
        reason: str | None
        if turn is not None and suffix is not None:
            suffix_ids = self._policy.tokenizer.encode(suffix)
            prompt_ids = turn.row.ids[: turn.end] + suffix_ids
            if turn.row.tip is turn and not turn.row.claimed:
                row, reason = turn.row, None
            else:
                reason = "branch"
        else:
            suffix_ids = prompt_ids = self._policy.tokenizer.encode(prompt_text)
            reason = "template" if turn is not None else "branch" if self._asked[digests[-1]] > 0 else "history"

        budget = self.contract.max_response_tokens - self.sampled_tokens - self._reserved
        room = self.contract.context_length - len(prompt_ids)
        allowed = max(0, min(sampling.max_tokens, budget, room))
        pending = PendingTurn(
            prompt_ids=prompt_ids,
            max_tokens=allowed,
            temperature=sampling.temperature,
            budget_bound=allowed < sampling.max_tokens,
            split_reason=reason,
            row=row,
            suffix_ids=suffix_ids,
            prompt_text=prompt_text,
            messages=shaped,
            tools=tools,
            digest=digests[-1],
        )
        self._asked[digests[-1]] += 1
        self._reserved += allowed
        if row is not None:
            row.claimed = True
        return pending

    def commit(self, pending: PendingTurn, reply: EngineReply | None) -> Completion:
        """Records the engine's reply (None where `max_tokens` was 0) and parses it for the agent.

        Raises EngineReplyError for a reply that cannot be recorded; the turn is then abandoned.
        """
        if reply is None:
            self.abandon(pending)
            return self._no_room(pending)
        try:
            _check_reply(reply, pending.max_tokens)
        except EngineReplyError:
            self.abandon(pending)
            raise
        self._release(pending)
        if (row := pending.row) is None:
            row = _Row(pending.split_reason if self._rows else None, [], [], [], [])
            self._rows.append(row)
            row.add_context(pending.prompt_ids)
        else:
            row.add_context(pending.suffix_ids)
        row.add_sampled(reply)
        self.sampled_tokens += len(reply.ids)
        if reply.engine not in self.engines:
            self.engines.append(reply.engine)
        if reply.finish_reason == "length" and pending.budget_bound:
            self.over_length = True

        sampled_text = self._policy.tokenizer.decode(reply.ids)
        parsed = self._policy.parser.parse(pending.prompt_text, sampled_text, reply.ids, pending.tools)
        answered = [*pending.messages, *template_messages([parsed.message])]
        row.tip = _Turn(row, len(row.ids), pending.prompt_text, sampled_text, parsed.reasoning, answered)
        self._turns[_extend(pending.digest, parsed.wire())] = row.tip
        return Completion(parsed, reply.finish_reason, len(pending.prompt_ids), len(reply.ids))

    def abandon(self, pending: PendingTurn) -> None:
        """Gives the turn up: nothing of it is recorded, and the same request finds the same context again."""
        self._release(pending)
        self._asked[pending.digest] -= 1

    def trajectory(self, rollout_id: str, task_id: str, sample: int, status: str, reward: float | None, metrics: dict[str, float]) -> Trajectory:
        """The rows recorded so far, with an outcome."""
        segments = [
            Segment(row.ids, row.mask, row.logprobs, row.versions, row.turns, row.finish_reasons, row.split_reason)
            for row in self._rows
        ]
        return Trajectory(rollout_id, task_id, sample, segments, status, reward, ",".join(self.engines), metrics)

    def _release(self, pending: PendingTurn) -> None:
        if not pending.open:
            raise RuntimeError("a planned turn was settled twice")
        pending.open = False
        self._reserved -= pending.max_tokens
        if pending.row is not None:
            pending.row.claimed = False

    def _no_room(self, pending: PendingTurn) -> Completion:
        """A normal, empty reply cut by length. What the environment said still joins the row if it fits."""
        self.over_length = True
        if pending.row is not None and len(pending.prompt_ids) <= self.contract.context_length:
            pending.row.add_context(pending.suffix_ids)
            pending.row.tip = None
        return Completion(Reply(""), "length", len(pending.prompt_ids), 0)

    def _answered(self, messages: list[dict[str, Any]], digests: list[bytes]) -> tuple[_Turn | None, int]:
        """The answered turn that ends the longest known part of the history, and that part's length."""
        for known in range(len(messages) - 1, 0, -1):
            if messages[known - 1]["role"] == "assistant" and (turn := self._turns.get(digests[known])) is not None:
                return turn, known
        return None, 0

    def _suffix(self, turn: _Turn, prompt_text: str, render_answered: Callable[[], str]) -> str | None:
        """What the template writes after `turn` in the new prompt; None where it is no continuation.

        The plain case: the new prompt starts with the old prompt and the decoded sampled ids. Where the
        template writes the turn otherwise than it was sampled (other spaces in a tool call's JSON, say),
        the border is the last special token of the rendered history: sampled, it ends the stored ids;
        not sampled (a turn cut by length), it is context like all else that the template adds.
        """
        if prompt_text.startswith(turn.prompt_text + turn.sampled_text):
            return prompt_text[len(turn.prompt_text) + len(turn.sampled_text) :]
        history = render_answered()
        if not prompt_text.startswith(history):
            return None
        shared = _common_prefix(history, turn.prompt_text)
        if turn.reasoning and turn.reasoning.strip() not in history[shared:]:
            return None
        tokenizer = self._policy.tokenizer
        border, token = max(((history.rfind(token, shared), token) for token in tokenizer.special_tokens), default=(-1, ""))
        if border < 0:
            return None
        if turn.row.ids[turn.end - 1] == tokenizer.special_tokens[token]:
            border += len(token)
        return prompt_text[border:]


def _check_reply(reply: EngineReply, max_tokens: int) -> None:
    columns: dict[str, list[Any]] = {"ids": reply.ids, "logprobs": reply.logprobs, "versions": reply.versions}
    for name, column in columns.items():
        if not column:
            raise EngineReplyError(f"engine {reply.engine}: the reply has no {name}; ids are never re-encoded from text")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise EngineReplyError(f"engine {reply.engine}: columns of unequal length {lengths}; one of each per sampled token expected")
    if len(reply.ids) > max_tokens:
        raise EngineReplyError(f"engine {reply.engine}: {len(reply.ids)} tokens sampled, {max_tokens} allowed")
    if reply.finish_reason not in ("stop", "length"):
        raise EngineReplyError(f"engine {reply.engine}: finish reason {reply.finish_reason!r}; stop or length expected")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in reply.logprobs):
        raise EngineReplyError(f"engine {reply.engine}: a logprob is missing or not finite")
    if not all(isinstance(version, int) and version >= 0 for version in reply.versions):
        raise EngineReplyError(f"engine {reply.engine}: a version stamp is missing; found {sorted(set(map(str, reply.versions)))}")


def _common_prefix(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _checked(index: int, message: Any) -> dict[str, Any]:
    """The message with its content as text. Raises RequestRefused."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestRefused(f"messages[{index}]: expected an object whose role is one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RequestRefused(f"messages[{index}].content: only text parts are supported")
        message = {**message, "content": "\n".join(map(str, parts))}
    elif content is not None and not isinstance(content, str):
        raise RequestRefused(f"messages[{index}].content: expected text")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(_function(call), dict) for call in calls)):
        raise RequestRefused(f"messages[{index}].tool_calls: expected a list of function calls")
    return message


def _function(call: Any) -> Any:
    return call.get("function") if isinstance(call, dict) else None


_canonical_json = msgspec.json.Encoder(order="deterministic")


def _digests(messages: list[dict[str, Any]], tools: Any, names: dict[str, Any]) -> list[bytes]:
    """digests[k] stands for the first k messages under these tools and template names."""
    digests = [hashlib.blake2b(_canonical_json.encode([tools, names]), digest_size=16).digest()]
    for message in messages:
        digests.append(_extend(digests[-1], message))
    return digests


def _extend(digest: bytes, message: dict[str, Any]) -> bytes:
    """Digest of a conversation and one more message. Two spellings of one JSON argument object are equal."""
    calls = [
        [call.get("id"), _function(call).get("name"), _argument_value(_function(call).get("arguments"))]
        for call in message.get("tool_calls") or []
    ]
    said = [message["role"], message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]
    return hashlib.blake2b(digest + _canonical_json.encode(said), digest_size=16).digest()


def _argument_value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return [msgspec.json.decode(arguments)]
    except (msgspec.DecodeError, RecursionError):
        return arguments
