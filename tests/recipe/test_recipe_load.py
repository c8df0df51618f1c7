"""Recipes: what is typed, what is refused and with which words, and that a saved recipe comes back the same."""

import dataclasses
import re
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.leaves import flatten, get, leaves
from megatron_agentrl.recipe.load import changed, documentation, load, load_resolved, save
from megatron_agentrl.recipe.schema import Advantage, Recipe
from megatron_agentrl.recipe.values import check_run_name

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.yaml").write_text("model:\n  path: models/small\n")
    return folder


def loaded(recipes: Path, *overrides: str) -> Recipe:
    return load(["recipe=small", *overrides], recipes)


def refused(recipes: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        loaded(recipes, *overrides)
    return str(caught.value)


def from_file(recipes: Path, body: str) -> Recipe:
    (recipes / "file.yaml").write_text("model:\n  path: m\n" + body)
    return load(["recipe=file"], recipes)


def refused_file(recipes: Path, body: str) -> str:
    with pytest.raises(RecipeError) as caught:
        from_file(recipes, body)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.lr=1e-6", "optimizer.lr", 1e-6),
        ("optimizer.lr=3", "optimizer.lr", 3.0),
        ("algorithm.shuffle_rewards=off", "algorithm.shuffle_rewards", False),
        ("algorithm.shuffle_rewards=No", "algorithm.shuffle_rewards", False),
        ("algorithm.shuffle_rewards=true", "algorithm.shuffle_rewards", True),
        ("run_name=12345678", "run_name", "12345678"),
        ("run_name=1e5", "run_name", "1e5"),
        ("run_name=0123", "run_name", "0123"),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.steps=100", "train.steps", 100),
        ("model.path=/x/y=z", "model.path", "/x/y=z"),
        ("model.path=<|im_end|>", "model.path", "<|im_end|>"),
        ("model.path=n[01-04]", "model.path", "n[01-04]"),
        ("model.path=a, b", "model.path", "a, b"),
        ("model.path={a: 1}", "model.path", "{a: 1}"),
        ("data.epochs=null", "data.epochs", None),
        ("topology.etp=2", "topology.etp", 2),
        ("algorithm.advantage=grpo", "algorithm.advantage", Advantage.grpo),
    ],
)
def test_an_override_is_typed_by_the_schema(recipes, override, key, value):
    found = get(loaded(recipes, override), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=1e-6,1e-5", "found 2 values, expected one float"),
        ("optimizer.lr=", "there is no value after '='"),
        ("optimizer.lr=nan", "finite number"),
        ("optimizer.lr=1e999", "finite number"),
        ("algorithm.kl_coef=None", "null is not allowed here"),
        ("data.epochs=None", "write null for no value"),
        ("data.eval=None", "write null for no value"),
        ("run_name=", "there is no value"),
        ("algorithm.shuffle_rewards=0", "expected true or false"),
        ("train.steps=4.5", "whole number"),
        ("train.steps=0123", "whole number"),
        ("train.steps=1_000", "whole number"),
        ("train.steps=1,2", "found 2 values"),
        ("train.steps=[1]", "whole number"),
        ("algorithm.advantage=gpro", "one of rloo, grpo, mean, zero; did you mean grpo?"),
        ("model.path=${oc.env:HOME}", "interpolation is off"),
        ("run_name=${seed}", "interpolation is off"),
        ("model.path=a\nb", "control character"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_key(recipes, override, words):
    message = refused(recipes, override)
    assert message.startswith(override.partition("=")[0] + "=")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=1e-6", "unknown key lr; did you mean optimizer.lr"),
        ("algorithm.clip_ratoi=0.3", "unknown key algorithm.clip_ratoi; did you mean algorithm.clip_"),
        ("algorithm.lr=1", "unknown key algorithm.lr; did you mean optimizer.lr"),
        ("trian.steps=3", "unknown key trian.steps; did you mean train.steps"),
        ("optimizer=3", "optimizer is a section"),
        ("optimizer.lr.x=3", "unknown key optimizer.lr.x"),
        ("+optimizer.lr=1", "can be set, not added or removed; write optimizer.lr=VALUE"),
        ("++optimizer.lr=1", "write optimizer.lr=VALUE"),
        ("+optimizer.lrr=1", "did you mean optimizer.lr"),
        ("~seed", "write seed=VALUE"),
        ("seed", "expected key=value"),
        ("sead", "did you mean seed?"),
    ],
)
def test_an_unknown_or_misplaced_key_is_refused_with_the_nearest_one(recipes, override, words):
    assert words in refused(recipes, override)


def test_a_key_given_twice_is_refused(recipes):
    assert refused(recipes, "seed=1", "seed=2") == "seed is given twice (1 and 2); give it once"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["recipe=smal"], "did you mean small?"),
        (["recipe=nothing.yaml"], "no such file"),
        (["recipe=../small"], "or a path that ends in .yaml"),
        (["recipe=" + "a" * 300 + ".yaml"], "cannot be reached"),
        (["recipe="], "found in"),
        (["seed=1"], "recipe=NAME is missing"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_ones_there_are(recipes, overrides, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        load(overrides, recipes)


@pytest.mark.parametrize("name", ["a/b", "..", "a..b", ".hidden", "-x", "a b", "a\n", "", "x" * 101, "é"])
def test_a_run_name_is_a_plain_word(name):
    with pytest.raises(RecipeError):
        check_run_name(name)


def test_the_run_is_named_after_its_recipe(recipes):
    assert loaded(recipes).run_name == "small"
    assert loaded(recipes, "run_name=other-1.b_c").run_name == "other-1.b_c"


@pytest.mark.parametrize(
    ("body", "key", "value"),
    [
        ("optimizer:\n  lr: 1e-6\n", "optimizer.lr", 1e-6),
        ("algorithm:\n  shuffle_rewards: off\n", "algorithm.shuffle_rewards", False),
        ("train:\n  steps: 1e3\n", "train.steps", 1000),
        ('run_name: "0123"\n', "run_name", "0123"),
        ("data:\n  epochs: null\n", "data.epochs", None),
        ("# no values\n", "seed", 0),
        ("run_name: abc1\n", "run_name", "abc1"),
    ],
)
def test_a_file_is_typed_by_the_same_rule(recipes, body, key, value):
    found = get(from_file(recipes, body), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("run_name: 0123\n", 'quote it: "0123"'),
        ("run_name: 12345678\n", "quote it"),
        ("run_name: 1e5\n", "quote it"),
        ("run_name: off\n", "quote it"),
        ("run_name: 12:30\n", "quote it"),
        ("train:\n  steps: 0123\n", "whole number"),
        ("train:\n  steps: 1:30\n", "whole number"),
        ("train:\n  steps: 4.5\n", "whole number"),
        ("algorithm:\n  kl_coef: None\n", "null is not allowed"),
        ("algorithm:\n  kl_coef:\n", "there is no value"),
        ("algorithm:\n  kl_coef: ~\n", "there is no value"),
        ("optimizer:\n  lr: [1e-6, 1e-5]\n", "found a list"),
        ("optimizer:\n  lrr: 1\n", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("optimizer: 3\n", "optimizer is a section"),
        ("lr: 1e-6\n", "unknown key lr; did you mean optimizer.lr"),
        ("seed: 1\nseed: 2\n", "seed is given twice"),
        ("data:\n  eval: ${seed}\n", "interpolation is off"),
        ('data:\n  eval: "${seed}"\n', "interpolation is off"),
        ("seed: [\n", "not valid YAML"),
        ("hydra:\n  run: x\n", "unknown key hydra"),
        ('data:\n  eval: "a\\0b"\n', "control character"),
        ("? [a, b]\n: 3\n", "found a list or mapping as a key"),
    ],
)
def test_a_fault_in_a_file_is_refused_with_file_and_line(recipes, body, words):
    message = refused_file(recipes, body)
    assert words in message
    assert re.match(r".*file\.yaml:\d+: ", message)
    assert "\n" not in message


def test_recipes_build_on_one_another_through_defaults(recipes):
    (recipes / "optimizer").mkdir()
    (recipes / "optimizer" / "fast.yaml").write_text("lr: 1e-3\nwarmup_steps: 7\n")
    (recipes / "base.yaml").write_text("model:\n  path: base\ntrain:\n  steps: 5\n  batch: 3\n")
    (recipes / "child.yaml").write_text("defaults:\n  - base\n  - optimizer: fast\n  - _self_\ntrain:\n  steps: 9\n")
    recipe = load(["recipe=child", "optimizer.warmup_steps=8"], recipes)
    assert (recipe.model.path, recipe.train.steps, recipe.train.batch) == ("base", 9, 3)
    assert (recipe.optimizer.lr, recipe.optimizer.warmup_steps) == (1e-3, 8)
    assert recipe.run_name == "child"


def test_a_recipe_elsewhere_may_build_on_the_shared_ones(recipes, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - small\n  - _self_\nseed: 5\n")
    recipe = load([f"recipe={mine}"], recipes)
    assert (recipe.model.path, recipe.seed, recipe.run_name) == ("models/small", 5, "mine")


def test_a_defaults_list_that_names_nothing_is_refused(recipes):
    (recipes / "child.yaml").write_text("defaults:\n  - nothing\n")
    with pytest.raises(RecipeError, match="nothing"):
        load(["recipe=child"], recipes)


@pytest.mark.parametrize("defaults", ["", "3", "{a: b}", "[child]"])
def test_a_defaults_list_that_is_none_or_names_itself_is_refused(recipes, defaults):
    (recipes / "child.yaml").write_text(f"defaults: {defaults}\nmodel: {{path: m}}\n")
    with pytest.raises(RecipeError, match=r"child\.yaml: its defaults list cannot be followed"):
        load(["recipe=child"], recipes)


def test_a_fault_in_a_file_of_the_defaults_list_names_that_file(recipes):
    (recipes / "base.yaml").write_text("train:\n  stesp: 5\n")
    (recipes / "child.yaml").write_text("defaults:\n  - base\n")
    with pytest.raises(RecipeError, match=r"base\.yaml:2: unknown key train\.stesp; did you mean train\.steps"):
        load(["recipe=child"], recipes)


def test_a_recipe_without_a_model_is_refused(recipes):
    (recipes / "empty.yaml").write_text("seed: 1\n")
    with pytest.raises(RecipeError, match=r"model\.path has no value"):
        load(["recipe=empty"], recipes)


def other_value(leaf):
    """Some value that is not the default, as text."""
    if issubclass(leaf.kind, Enum):
        others = [member.value for member in leaf.kind if member is not leaf.default]
        return others[0] if others else leaf.default.value
    if leaf.kind is bool:
        return "false" if leaf.default else "true"
    return {int: "77", float: "0.125", str: "some-text"}[leaf.kind]


@pytest.mark.parametrize("key", list(leaves()))
def test_every_leaf_can_be_set_from_the_command_line_and_from_a_file(recipes, key):
    text = other_value(leaves()[key])
    recipe = loaded(recipes, f"{key}={text}")
    expected = load_resolved_with(recipes, key, text)
    assert get(recipe, key) == get(expected, key)
    others = {name: value for name, value in flatten(recipe).items() if name not in (key, "model.path", "run_name")}
    assert others == {name: leaves()[name].default for name in others}
    assert get(recipe, key) != leaves()[key].default or len(getattr(leaves()[key].kind, "__members__", "ab")) == 1


def load_resolved_with(recipes: Path, key: str, text: str) -> Recipe:
    *sections, name = key.split(".")
    body = "".join("  " * i + f"{section}:\n" for i, section in enumerate(sections))
    body += "  " * len(sections) + f"{name}: {text}\n"
    if key != "model.path":
        body = body.replace("model:\n", "model:\n  path: models/small\n")
        if not key.startswith("model."):
            body += "model:\n  path: models/small\n"
    (recipes / "one.yaml").write_text(body)
    return load(["recipe=one"], recipes)


def test_every_leaf_is_documented():
    assert [leaf.key for leaf in documentation() if not leaf.doc.endswith(".")] == []


def test_saving_and_loading_gives_the_same_values_again(recipes, tmp_path):
    recipe = loaded(recipes, "run_name=0123", "optimizer.lr=1e-6", "data.epochs=null", "data.eval=null.jsonl", "seed=7")
    save(recipe, tmp_path / "recipe.yaml")
    again = load_resolved(tmp_path / "recipe.yaml")
    assert again == recipe
    first = (tmp_path / "recipe.yaml").read_bytes()
    save(again, tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").read_bytes() == first
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


texts = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: "${" not in text
)


@settings(max_examples=30, deadline=None)
@given(path=texts, lr=st.floats(1e-30, 1e30), steps=st.integers(0, 2**53))
def test_any_text_and_number_survives_a_round_trip(tmp_path_factory, path, lr, steps):
    recipe = Recipe()
    recipe.model.path, recipe.optimizer.lr, recipe.train.steps, recipe.run_name = path, lr, steps, "off"
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    save(recipe, file)
    assert load_resolved(file) == recipe


def test_changes_are_listed_and_say_whether_a_run_may_go_on_with_them(recipes):
    old, new = loaded(recipes), loaded(recipes, "train.steps=7", "eval.every=3", "seed=2", "rollout.start_timeout=9")
    assert [(change.key, change.resumable) for change in changed(old, new)] == [
        ("seed", False),
        ("rollout.start_timeout", True),
        ("train.steps", True),
        ("eval.every", True),
    ]
    assert str(changed(old, new)[0]) == "seed: 0 -> 2"
    assert changed(old, dataclasses.replace(old)) == []


def test_the_recipes_of_this_repository_load():
    for path in sorted((REPOSITORY / "recipes").glob("*.yaml")):
        assert load([f"recipe={path.stem}"], REPOSITORY / "recipes").run_name == path.stem


def test_another_source_on_the_command_line_drops_the_files_own_prompts(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {path: m}\ndata: {prompts: a.jsonl, eval: b.jsonl}\n")
    recipe = load(["recipe=base", "data.source=reasoning_gym", "data.task=chain_sum"], tmp_path)
    assert (recipe.data.prompts, recipe.data.eval, recipe.data.task) == (None, None, "chain_sum")
    assert load(["recipe=base"], tmp_path).data.prompts == "a.jsonl"
    kept = load(["recipe=base", "data.source=reasoning_gym", "data.prompts=c.jsonl"], tmp_path)
    assert kept.data.prompts == "c.jsonl"  # what the user gave is not dropped: `check` refuses it
