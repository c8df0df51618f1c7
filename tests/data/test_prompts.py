from __future__ import annotations

import gzip
import json
import re
import time

import pytest

from megatron_agentrl.data.prompts import Prompt, fingerprint, load_prompts, read_prompts
from megatron_agentrl.data.reasoning_gym import check_task
from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.schema import Recipe, Source


def write(path, *records) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def test_a_prompt_is_text_or_messages_and_the_rest_is_metadata(tmp_path):
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "1+1=?", "answer": "2", "level": 3, "tags": ["easy"]},
        "",
        {
            "id": "q7",
            "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "é"}],
            "answer": 4,
        },
        {"prompt": "say anything"},
    )
    assert read_prompts(path) == [
        Prompt("line-1", [{"role": "user", "content": "1+1=?"}], "2", {"level": 3, "tags": ["easy"]}),
        Prompt("q7", [{"role": "system", "content": "Add."}, {"role": "user", "content": "é"}], "4", {}),
        Prompt("line-4", [{"role": "user", "content": "say anything"}], None, {}),
    ]


def test_a_gzipped_file_reads_the_same(tmp_path):
    plain = write(tmp_path / "a.jsonl", {"prompt": "x", "answer": "y"})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read_prompts(tmp_path / "a.jsonl.gz") == read_prompts(plain)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"p.jsonl: holds no lines"),
        (["", "  "], r"p.jsonl: holds no lines"),
        ([{"prompt": "a"}, '{"prompt": '], r"p.jsonl:2: not JSON"),
        ([["a"]], r"p.jsonl:1: found a list, expected a JSON object"),
        ([{"answer": "2"}], r"p.jsonl:1: has neither prompt nor messages"),
        ([{"prompt": "a", "messages": []}], r"p.jsonl:1: has both prompt and messages"),
        ([{"prompt": ""}], r"p.jsonl:1: prompt is empty text"),
        ([{"prompt": ["a"]}], r"p.jsonl:1: prompt is a list"),
        ([{"messages": []}], r"p.jsonl:1: messages is an empty list"),
        ([{"messages": ["hi"]}], r"p.jsonl:1: messages\[0\] is text, expected an object"),
        ([{"messages": [{"content": "hi"}]}], r"p.jsonl:1: messages\[0\] has no role"),
        ([{"messages": [{"role": "user"}]}], r"p.jsonl:1: messages\[0\] has neither content nor tool_calls"),
        ([{"messages": [{"role": "user", "content": 5}]}], r"p.jsonl:1: messages\[0\].content is the number 5"),
        ([{"messages": [{"role": "user", "content": None}]}], r"p.jsonl:1: messages\[0\].content is null"),
        (['{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"], r"p.jsonl:1: not JSON"),
        ([{"prompt": "a", "answer": 1.5}], r"p.jsonl:1: answer is the number 1.5, expected text"),
        ([{"prompt": "a", "answer": True}], r"p.jsonl:1: answer is a boolean"),
        ([{"prompt": "a", "id": None}], r"p.jsonl:1: id is null"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], r"p.jsonl:2: id 'x' is already line 1's"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path, lines, message):
    path = write(tmp_path / "p.jsonl", *lines)
    with pytest.raises(RecipeError, match=message):
        read_prompts(path)


def test_a_file_that_is_missing_or_half_written_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"none.jsonl: cannot be read \(No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-12])
    with pytest.raises(RecipeError, match=r"half.jsonl.gz: not a whole gzip file"):
        read_prompts(tmp_path / "half.jsonl.gz")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(RecipeError, match=r"bytes.jsonl:1: not JSON"):
        read_prompts(tmp_path / "bytes.jsonl")


def recipe(**data) -> Recipe:
    made = Recipe()
    for name, value in data.items():
        setattr(made.data, name, value)
    return made


def test_a_held_out_prompt_that_is_also_trained_on_is_refused(tmp_path):
    train = write(tmp_path / "train.jsonl", *({"prompt": f"{i}+1", "answer": "x"} for i in range(5)))
    held = write(tmp_path / "eval.jsonl", {"prompt": "9+1"}, {"prompt": "3+1"}, {"prompt": "2+1"})
    with pytest.raises(
        RecipeError, match=r"eval.jsonl: line-2 is also a training prompt \(line-4 of .*train.jsonl\): '3"
    ):
        load_prompts(recipe(prompts=train, eval=held))
    held = write(tmp_path / "eval.jsonl", {"prompt": "9+1"})
    sets = load_prompts(recipe(prompts=train, eval=held))
    assert (len(sets.train), len(sets.held_out)) == (5, 1)
    assert load_prompts(recipe(prompts=train)).held_out == []


def test_a_missing_source_setting_is_named():
    with pytest.raises(RecipeError, match="data.prompts"):
        load_prompts(recipe())
    with pytest.raises(RecipeError, match="data.task"):
        load_prompts(recipe(source=Source.reasoning_gym))


def test_25000_lines_take_well_under_a_second(tmp_path):
    train = write(
        tmp_path / "t.jsonl", *({"prompt": f"{i}+{i}*3=?", "answer": str(4 * i), "i": i} for i in range(25000))
    )
    held = write(tmp_path / "e.jsonl", *({"prompt": f"{i}-{i}*3=?", "answer": str(i)} for i in range(500)))
    start = time.process_time()
    sets = load_prompts(recipe(prompts=train, eval=held))
    assert time.process_time() - start < 1.0
    assert len(sets.train) == 25000


def test_a_fingerprint_sees_order_and_content():
    a, b = Prompt("a", [{"role": "user", "content": "x"}]), Prompt("b", [{"role": "user", "content": "y"}])
    assert fingerprint([a, b]) == fingerprint([a, b])
    assert len({fingerprint(prompts) for prompts in ([a, b], [b, a], [a], [a, a])}) == 4


def test_reasoning_gym_prompts_hold_what_the_scorer_needs():
    import reasoning_gym

    sets = load_prompts(recipe(source=Source.reasoning_gym, task="chain_sum", size=20, eval_size=10))
    assert (len(sets.train), len(sets.held_out)) == (20, 10)
    assert load_prompts(recipe(source=Source.reasoning_gym, task="chain_sum", size=20, eval_size=10)) == sets
    questions = [prompt.messages[0]["content"] for prompt in sets.train + sets.held_out]
    assert len(set(questions[20:])) == 10
    assert not set(questions[:20]) & set(questions[20:])
    first = sets.train[0]
    meta = first.metadata["reasoning_gym"]
    assert meta["task"] == "chain_sum"
    score = reasoning_gym.get_score_answer_fn(meta["task"])
    assert score(first.answer, meta["entry"]) == 1.0
    assert score("no idea", meta["entry"]) < 1.0


def test_an_unknown_reasoning_gym_task_gives_the_nearest_name():
    with pytest.raises(RecipeError, match="data.task=chain_sun: no such reasoning-gym task; did you mean chain_sum?"):
        load_prompts(recipe(source=Source.reasoning_gym, task="chain_sun"))


def test_task_options_are_the_tasks_own_settings():
    options = "min_terms=2,max_terms=2,min_digits=1, max_digits=1"
    sets = load_prompts(
        recipe(source=Source.reasoning_gym, task="chain_sum", task_options=options, size=30, eval_size=10)
    )
    for prompt in sets.train + sets.held_out:
        assert re.fullmatch(r"State the final answer .*: \d [+-] \d =", prompt.messages[0]["content"])


def test_a_task_option_may_be_a_list():
    found = check_task("base_conversion", "min_base=2,max_base=3")
    assert found == {"min_base": 2, "max_base": 3}
    assert check_task("countdown", "operators=['+', '-'],min_numbers=3") == {"operators": ["+", "-"], "min_numbers": 3}


@pytest.mark.parametrize(
    "options, message",
    [
        ("min_term=2", "chain_sum has no setting min_term; did you mean min_terms?"),
        ("size=3", "chain_sum has no setting size"),
        ("min_terms", "found 'min_terms', expected name=value,name=value"),
        ("min_terms=", "found 'min_terms=', expected name=value,name=value"),
        ("min_terms=2,min_terms=3", "min_terms is given twice; give it once"),
        ("min_terms=0", "chain_sum refuses it (min_terms must be positive); change the values"),
        ("min_terms=two", "chain_sum refuses it"),
        ("min_terms=[2", "min_terms=[2: expected a number, true, false, text or [list]"),
    ],
)
def test_task_options_that_a_task_does_not_have_are_refused(options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_prompts(recipe(source=Source.reasoning_gym, task="chain_sum", task_options=options))


def test_a_task_with_too_few_questions_is_refused():
    with pytest.raises(RecipeError, match="are not also training questions; lower data.size or data.eval_size"):
        load_prompts(recipe(source=Source.reasoning_gym, task="coin_flip", size=400, eval_size=100_0))
