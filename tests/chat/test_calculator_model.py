"""The example's model folder and data: they are what their makers write, and what the task needs."""

import gzip
import json
from pathlib import Path

import pytest

from examples.calculator import make_data, make_model
from examples.calculator.agent import calculator
from megatron_agentrl.chat.supervised import encode_demonstration
from megatron_agentrl.chat.template import ChatTemplate, TemplateError, template_messages
from megatron_agentrl.chat.tokenizer import Tokenizer

EXAMPLE = Path(make_model.__file__).parent
MODEL = EXAMPLE / "model"
TOKENIZER, TEMPLATE = Tokenizer(MODEL), ChatTemplate.from_folder(MODEL)

DEMONSTRATION = [
    {"role": "user", "content": "63+43*9=?"},
    *make_data.tool_turn("call_0", "63+43", "106"),
    *make_data.tool_turn("call_1", "106*9", "954"),
    {"role": "assistant", "content": "954"},
]


def test_the_model_folder_is_what_its_maker_writes():
    for name, text in make_model.files().items():
        assert (MODEL / name).read_text() == text, f"run examples/calculator/make_model.py: {name} differs"


def test_the_data_regenerates_identically():
    for name, content in make_data.files().items():
        found = (EXAMPLE / "data" / name).read_bytes()
        if name.endswith(".gz"):  # compressors of other zlib builds may write other bytes
            found, content = gzip.decompress(found), gzip.decompress(content)
        assert found == content, f"run examples/calculator/make_data.py: {name} differs"


def value(question: str) -> str:
    """Left to right, by a route of its own."""
    parts = question.removesuffix("=?").replace("+", " + ").replace("-", " - ").replace("*", " * ").split()
    total = int(parts[0])
    for operator, operand in zip(parts[1::2], parts[2::2], strict=True):
        total = (
            total + int(operand)
            if operator == "+"
            else total - int(operand)
            if operator == "-"
            else total * int(operand)
        )
    return str(total)


def read(name: str) -> list[dict]:
    content = (EXAMPLE / "data" / name).read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if name.endswith(".gz") else content).splitlines()]


def test_held_out_questions_stand_nowhere_else_and_answers_are_right():
    held_out, train, shown = read("held_out.jsonl"), read("train.jsonl.gz"), read("demonstrations.jsonl.gz")
    questions = {line["prompt"] for line in held_out}
    assert (len(questions), len({line["prompt"] for line in train}), len(shown)) == (256, 8192, 25600)
    assert not questions & {line["prompt"] for line in train}
    assert not questions & {line["messages"][0]["content"] for line in shown}
    assert all(line["answer"] == value(line["prompt"]) for line in held_out + train)


def test_about_a_quarter_of_the_demonstrations_is_right():
    shown = read("demonstrations.jsonl.gz")
    right = sum(line["messages"][-1]["content"] == value(line["messages"][0]["content"]) for line in shown) / len(shown)
    skipped = sum(len(line["messages"]) == 2 for line in shown) / len(shown)
    assert right == pytest.approx(0.265, abs=0.01)
    assert skipped == pytest.approx(0.35, abs=0.01)
    assert (EXAMPLE / "data" / "demonstrations.jsonl.gz").stat().st_size < 2_000_000


def test_demonstrations_fit_the_turn_and_the_model():
    for line in read("demonstrations.jsonl.gz")[:500]:
        ids, mask = encode_demonstration(line["messages"], None, TEMPLATE, TOKENIZER)
        assert len(ids) == len(mask) <= 128
        longest = max(map(len, "".join(map(str, mask)).split("0")))
        assert 1 <= longest <= 14


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("63+43", "106"),
        ("-5*3", "-15"),
        ("7-9", "-2"),
        ("1+2+3", "err"),
        ("", "err"),
        ("1/2", "err"),
        ("9999999+1", "err"),
        ("1+12345", "err"),
        ("\u0661+1", "err"),
    ],
)
def test_the_calculator_does_one_operation(expression, result):
    assert calculator(expression) == result


def test_bytes_are_their_own_ids_and_specials_follow():
    assert TOKENIZER.vocab_size == 272
    assert TOKENIZER.encode("63+43*9=?") == list(b"63+43*9=?")
    assert TOKENIZER.encode("é\n ") == [0xC3, 0xA9, 10, 32]
    assert TOKENIZER.encode("<pad><bos><user><asst><call></call><res></res><ans><eos>") == list(range(256, 266))
    assert TOKENIZER.decode([0xC3, 0xA9, 265]) == "é<eos>"
    assert TOKENIZER.stop_ids == (261, 265)


def test_a_demonstration_is_the_token_sequence_of_the_task():
    ids, mask = encode_demonstration(DEMONSTRATION, None, TEMPLATE, TOKENIZER)
    expected = "<bos><user>63+43*9=?<asst><call>63+43</call><res>106</res><call>106*9</call><res>954</res><ans>954<eos>"
    assert ids == TOKENIZER.encode(expected)
    trained = [id for id, on in zip(ids, mask, strict=True) if on]
    assert TOKENIZER.decode(trained) == "<call>63+43</call><call>106*9</call><ans>954<eos>"
    assert TEMPLATE.render(DEMONSTRATION[:1], add_generation_prompt=True) == "<bos><user>63+43*9=?<asst>"
    assert TEMPLATE.render([{"role": "user", "content": "1+1=?"}]) == "<bos><user>1+1=?"


def test_text_after_the_stop_token_is_context():
    chatml = ChatTemplate(
        "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<user>assistant\n{% endif %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ids, mask = encode_demonstration(messages, None, chatml, TOKENIZER)
    assert ids == TOKENIZER.encode(chatml.render(messages))
    assert TOKENIZER.decode([id for id, on in zip(ids, mask, strict=True) if on]) == "b<eos>"


def test_a_template_that_rewrites_old_turns_is_refused_for_demonstrations():
    forgetful = ChatTemplate(
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(TemplateError, match="writes message 1 differently"):
        encode_demonstration(messages, None, forgetful, TOKENIZER)
    with pytest.raises(TemplateError, match="no assistant message"):
        encode_demonstration(messages[:1], None, forgetful, TOKENIZER)


@pytest.mark.slow
def test_transformers_reads_the_folder_as_we_do():
    from transformers import AutoConfig, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    for upto, generate in ((1, True), (3, True), (5, True), (6, False)):
        ids = theirs.apply_chat_template(
            template_messages(DEMONSTRATION[:upto]), add_generation_prompt=generate, return_dict=False
        )
        assert ids == TOKENIZER.encode(
            TEMPLATE.render(template_messages(DEMONSTRATION[:upto]), add_generation_prompt=generate)
        )
    parsed = theirs.parse_response("<call>63+43</call>", prefix="<bos><user>63+43*9=?<asst>")
    assert parsed["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "63+43"}}
    config = AutoConfig.from_pretrained(MODEL)
    assert (config.vocab_size, config.hidden_size, config.n_routed_experts, len(theirs)) == (272, 128, 8, 272)
