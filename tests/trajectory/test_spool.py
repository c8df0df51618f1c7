"""Codec and spool: what is written is what is read, and nothing else is."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_agentrl.trajectory.codec import FORMAT_VERSION, CodecError, decode, encode
from megatron_agentrl.trajectory.spool import HEADER_BYTES, SpoolCorrupt, SpoolError, SpoolReader, SpoolWriter, scan
from megatron_agentrl.trajectory.types import Segment, Trajectory, Where


def trajectory(name="a", turns=((2, 4),), length=5) -> Trajectory:
    mask, logprobs, versions = [0] * length, [0.0] * length, [-1] * length
    for start, stop in turns:
        for position in range(start, stop):
            mask[position], logprobs[position], versions[position] = 1, -0.5 * position, 7
    segment = Segment(list(range(length)), mask, logprobs, versions, list(turns), ["stop"] * len(turns))
    return Trajectory(name, "task", 3, [segment], "ok", 1.0, "engine-0", {"through_tool": 1.0})


def spool_file(run: Path, number=0) -> Path:
    return run / "spool" / f"gateway-0-{number:06d}.spool"


def filled(run: Path, names=("a", "b", "c")) -> list[Where]:
    writer = SpoolWriter(run, "gateway-0")
    places = [writer.append(trajectory(name)) for name in names]
    writer.close()
    return places


def test_a_trajectory_survives_the_codec():
    assert decode(encode(trajectory())) == trajectory()


def test_another_format_version_is_named():
    payload = msgspec.msgpack.encode((FORMAT_VERSION + 1, {}))
    with pytest.raises(CodecError, match=f"format {FORMAT_VERSION + 1} found, {FORMAT_VERSION} expected"):
        decode(payload)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_as_codec_errors(payload):
    with pytest.raises(CodecError):
        decode(payload)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda s: s.logprobs.pop(), "5 ids, but loss_mask, logprobs and versions hold \\(5, 4, 5\\)"),
        (lambda s: s.finish_reasons.pop(), "1 turns and 0 finish reasons"),
        (lambda s: s.turns.__setitem__(0, (1, 3)), "is not a run of sampled tokens"),
        (lambda s: s.versions.__setitem__(0, 7), "version stamps 3"),
        (lambda s: s.loss_mask.__setitem__(4, 1), "the loss mask 3"),
    ],
)
def test_contradicting_columns_are_refused(broken, message):
    made = trajectory()
    broken(made.segments[0])
    with pytest.raises(CodecError, match=message):
        encode(made)


def test_what_is_appended_is_read_back_by_place(tmp_path):
    places = filled(tmp_path)
    reader = SpoolReader(tmp_path)
    assert [reader.read(place).rollout_id for place in places] == ["a", "b", "c"]
    assert [place for place, _ in scan(spool_file(tmp_path))] == places
    reader.close()


def test_a_file_torn_anywhere_in_its_last_record_reopens_without_it(tmp_path):
    places = filled(tmp_path)
    whole = spool_file(tmp_path).read_bytes()
    last_record = places[2].offset - HEADER_BYTES
    for size in range(last_record + 1, len(whole)):
        spool_file(tmp_path).write_bytes(whole[:size])
        writer = SpoolWriter(tmp_path, "gateway-0")
        assert spool_file(tmp_path).stat().st_size == last_record
        assert writer.append(trajectory("d")).offset == places[2].offset
        writer.close()
        assert [decode(payload).rollout_id for _, payload in scan(spool_file(tmp_path))] == ["a", "b", "d"]


def test_a_tail_of_zero_bytes_is_torn_not_damaged(tmp_path):
    places = filled(tmp_path)
    with spool_file(tmp_path).open("ab") as file:
        file.write(bytes(100))
    assert [place for place, _ in scan(spool_file(tmp_path))] == places


def test_every_flipped_byte_is_refused_with_file_and_offset(tmp_path):
    places = filled(tmp_path)
    whole = bytearray(spool_file(tmp_path).read_bytes())
    for position in range(len(whole)):
        whole[position] ^= 0x10
        spool_file(tmp_path).write_bytes(whole)
        with pytest.raises(SpoolCorrupt, match=r"gateway-0-000000\.spool at offset \d+"):
            list(scan(spool_file(tmp_path)))
        with pytest.raises(SpoolCorrupt):
            SpoolWriter(tmp_path, "gateway-0")
        whole[position] ^= 0x10
    spool_file(tmp_path).write_bytes(whole)
    flipped = bytearray(whole)
    flipped[places[1].offset + 3] ^= 1
    spool_file(tmp_path).write_bytes(flipped)
    reader = SpoolReader(tmp_path)
    assert reader.read(places[0]).rollout_id == "a"
    with pytest.raises(SpoolCorrupt, match=f"spool/gateway-0-000000.spool at offset {places[1].offset}"):
        reader.read(places[1])


def test_a_missing_file_is_named(tmp_path):
    place = filled(tmp_path)[0]
    spool_file(tmp_path).unlink()
    with pytest.raises(SpoolError, match=r"gateway-0-000000\.spool cannot be read \(No such file or directory\)"):
        SpoolReader(tmp_path).read(place)


def test_a_receipt_that_points_past_the_end_is_refused(tmp_path):
    place = filled(tmp_path)[2]
    with pytest.raises(SpoolCorrupt, match="expected"):
        SpoolReader(tmp_path).read(msgspec.structs.replace(place, length=place.length + 1))


def test_files_roll_at_their_size_and_stay_readable(tmp_path):
    writer = SpoolWriter(tmp_path, "gateway-0", roll_bytes=300)
    places = [writer.append(trajectory(str(number))) for number in range(12)]
    writer.close()
    assert len({place.file for place in places}) > 1
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == sorted(
        {Path(place.file).name for place in places}
    )
    reader = SpoolReader(tmp_path)
    assert [reader.read(place).rollout_id for place in places] == [str(number) for number in range(12)]


def test_one_name_has_one_writer(tmp_path):
    writer = SpoolWriter(tmp_path, "gateway-0")
    with pytest.raises(SpoolError, match="has another writer"):
        SpoolWriter(tmp_path, "gateway-0")
    writer.close()
    SpoolWriter(tmp_path, "gateway-0").close()


@pytest.mark.parametrize("file", ["../secret.spool", "/etc/passwd", "spool/../recipe.yaml", "spool/a/b.spool"])
def test_a_place_outside_the_spool_is_refused(tmp_path, file):
    with pytest.raises(SpoolError, match="is not a spool file name"):
        SpoolReader(tmp_path).read(Where(file, 0, 1, 0))
