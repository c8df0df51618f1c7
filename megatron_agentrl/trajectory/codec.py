"""Trajectory ↔ bytes: msgpack with a format version in front.

The payload is a two-element array `[format version, trajectory]`, so a reader of another version
can say which one it met before it touches a field. Not a compressor, and not a file format: framing
and checksums belong to `trajectory.spool`.
"""

from __future__ import annotations

import msgspec

from megatron_agentrl.trajectory.types import NOT_SAMPLED, STATUSES, Segment, Trajectory

#: Raised by one whenever the meaning of a field of `Trajectory` or `Segment` changes.
FORMAT_VERSION = 1


class CodecError(ValueError):
    """The bytes are not a trajectory of this format version, or the trajectory contradicts itself."""


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_trajectory = msgspec.msgpack.Decoder(Trajectory)


def encode(trajectory: Trajectory) -> bytes:
    """Bytes of one trajectory. Raises CodecError when it breaks a rule of `check`."""
    check(trajectory)
    return _encoder.encode((FORMAT_VERSION, trajectory))


def decode(payload: bytes) -> Trajectory:
    """The trajectory of `encode`'s bytes, checked. Raises CodecError."""
    try:
        version, body = _envelope.decode(payload)
    except msgspec.DecodeError as error:
        raise CodecError(f"not a trajectory payload: {error}") from error
    if version != FORMAT_VERSION:
        raise CodecError(
            f"trajectory format {version} found, {FORMAT_VERSION} expected; read it with the release that wrote it"
        )
    try:
        trajectory = _trajectory.decode(body)
    except msgspec.DecodeError as error:
        raise CodecError(f"trajectory payload of format {version} has a wrong field: {error}") from error
    check(trajectory)
    return trajectory


def check(trajectory: Trajectory) -> None:
    """Refuses a trajectory whose columns cannot be trained on as they stand. Raises CodecError."""
    if trajectory.status not in STATUSES:
        raise CodecError(
            f"{trajectory.rollout_id}: status {trajectory.status!r}; expected one of {', '.join(STATUSES)}"
        )
    for number, segment in enumerate(trajectory.segments):
        _check_segment(f"{trajectory.rollout_id}: segment {number}", segment)


def _check_segment(name: str, segment: Segment) -> None:
    length = len(segment.token_ids)
    columns = (len(segment.loss_mask), len(segment.logprobs), len(segment.versions))
    if columns != (length,) * 3:
        raise CodecError(
            f"{name}: {length} ids, but loss_mask, logprobs and versions hold {columns}; expected equal lengths"
        )
    if len(segment.turns) != len(segment.finish_reasons):
        raise CodecError(
            f"{name}: {len(segment.turns)} turns and {len(segment.finish_reasons)} finish reasons; expected as many"
        )
    sampled = 0
    end = 0
    for start, stop in segment.turns:
        if not end <= start < stop <= length or 0 in segment.loss_mask[start:stop]:
            raise CodecError(
                f"{name}: turn [{start}, {stop}) is not a run of sampled tokens after {end} and within {length}"
            )
        sampled += stop - start
        end = stop
    masked = length - segment.loss_mask.count(0)
    stamped = length - segment.versions.count(NOT_SAMPLED)
    if not sampled == masked == stamped:
        raise CodecError(
            f"{name}: turns hold {sampled} tokens, the loss mask {masked}, version stamps {stamped}; expected equal"
        )
