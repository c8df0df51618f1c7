from __future__ import annotations

import json

import pytest

from megatron_agentrl.data.demonstrations import Demonstration, batch_indices, read_demonstrations
from megatron_agentrl.recipe.errors import RecipeError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_messages_and_tools_are_read(tmp_path):
    path = tmp_path / "d.jsonl"
    tools = [{"type": "function", "function": {"name": "add"}}]
    path.write_text("\n".join([json.dumps({"messages": CHAT}), json.dumps({"messages": CHAT, "tools": tools})]))
    assert read_demonstrations(path) == [Demonstration(CHAT), Demonstration(CHAT, tools)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": CHAT[:1]}, "d.jsonl:1: no assistant message"),
        ({"message": CHAT}, "d.jsonl:1: unknown key message"),
        ({"messages": None}, "d.jsonl:1: messages is null"),
        ({"messages": CHAT, "tools": {}}, "d.jsonl:1: tools is an object, expected a list"),
    ],
)
def test_a_bad_demonstration_is_refused_with_file_and_line(tmp_path, record, message):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(RecipeError, match=message):
        read_demonstrations(path)


def test_batches_are_passes_cut_into_pieces_and_depend_on_the_step_alone():
    batches = [batch_indices(10, 4, step, seed=0) for step in range(5)]
    flat = sum(batches, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert batch_indices(10, 4, 3, seed=0) == batches[3]
    assert batch_indices(10, 4, 3, seed=1) != batches[3]
    assert len(batch_indices(3, 8, 0, seed=0)) == 8  # more than there are: the next pass follows
