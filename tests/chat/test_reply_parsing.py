"""Sampled text → message: by response template, or plain."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.chat.parse import ReplyParser
from megatron_agentrl.chat.regions import ResponseTemplate, ResponseTemplateError
from megatron_agentrl.chat.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "calculator" / "model"
TOKENIZER = Tokenizer(MODEL)
CALCULATOR = ReplyParser(TOKENIZER)

#: JSON calls and reasoning, as many chat models write them.
HERMES = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        "content": {"close": "<|im_end|>"},
    },
}
#: Arguments as tags, to be cast by the tool's schema.
TAGS = {
    "start_anchor_pattern": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>\w+)>",
            "close": "</function>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>",
                "merge_duplicates": True,
            },
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
DIALECT = {
    "start_anchor": "A:",
    "fields": {
        "note": {"open": "[", "close": "]", "content": "kv-lines", "content_args": {"value_parser": {"name": "int"}}},
        "tool_calls": {
            "open": "call:",
            "close": ";",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["«", "»"]]},
            "transform": [{"type": "function", "function": {"name": "f", "arguments": "{content}"}}],
        },
        "content": {"open_pattern": "(?:^|\n)say ", "close_pattern": r"(?=\n)|$", "repeats": True, "join": " | "},
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "ok": {"type": "boolean"},
                    "items": {"type": "array"},
                    "text": {"type": "string"},
                },
            },
        },
    }
]
TEXTS = [
    (HERMES, "<|im_start|>assistant\n", "Hello<|im_end|>"),
    (HERMES, "<|im_start|>assistant\n<think>\n", "why\n</think>\n\nBecause<|im_end|>"),
    (
        HERMES,
        "x<|im_start|>assistant\nold<|im_end|><|im_start|>assistant\n",
        '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    ),
    (
        HERMES,
        "",
        'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>{"name": "g", "arguments": {"y": [1]}}</tool_call>',
    ),
    (
        TAGS,
        "<assistant>",
        "<function=f><parameter=n>7</parameter><parameter=x>2.5</parameter><parameter=ok>true</parameter></function>",
    ),
    (
        TAGS,
        "<assistant>",
        "say<function=f><parameter=x>None</parameter><parameter=items>[1, 2]</parameter><parameter=text>7</parameter></function>",
    ),
    (
        TAGS,
        "<assistant>",
        "<function=f><parameter=n>1</parameter><parameter=n>2</parameter><parameter=n>z</parameter></function>end",
    ),
    (DIALECT, "A:", 'say one\nsay two\n[a: 1\nb: 2]call:{q:«it\'s "quoted"»,r:3};'),
    (DIALECT, "A:", "drop this"),
]


@pytest.mark.parametrize(
    ("text", "content", "expression"),
    [("<call>63+43</call>", None, "63+43"), ("<ans>954<eos>", "954", None), ("<ans> 9<eos>", " 9", None)],
)
def test_the_calculators_turns_are_calls_and_answers(text, content, expression):
    reply = CALCULATOR.parse("<bos><user>1+1=?<asst>", text, TOKENIZER.encode(text))
    assert (reply.content, reply.parse_failure) == (content, None)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == (
        [{"expression": expression}] if expression else []
    )


@pytest.mark.parametrize("text", ["<call>63+4", "12<ans>954<eos>", "954", "<res>3</res>", "<pad>", "x<call>1+1</call>"])
def test_what_is_neither_call_nor_answer_is_raw_text_with_a_reason(text):
    reply = CALCULATOR.parse("<bos><user>1+1=?<asst>", text, TOKENIZER.encode(text))
    ends = next((stop for stop in ("<eos>", "</call>") if text.endswith(stop)), "")
    assert reply.content == text.removesuffix(ends) and not reply.tool_calls
    assert reply.parse_failure


def test_an_empty_turn_is_empty_content_and_no_failure():
    for text in ("<eos>", "<ans><eos>"):
        reply = (
            ReplyParser(TOKENIZER, HERMES).parse("", "", [])
            if text == "<eos>"
            else CALCULATOR.parse("<asst>", "<ans>", [264])
        )
        assert reply.content in ("", "<ans>")


def test_without_a_template_a_turn_is_plain_content(tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text((MODEL / name).read_text())
    plain = Tokenizer(tmp_path)
    reply = ReplyParser(plain).parse("", "hi<call>x<eos>", plain.encode("hi<call>x<eos>"))
    assert (reply.content, reply.tool_calls, reply.parse_failure) == ("hix", (), None)


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_reasoning_calls_and_dialects_parse_to_these_values(number):
    expected = [
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "reasoning_content": "why", "content": "Because"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {}}},
                {"type": "function", "function": {"name": "g", "arguments": {"y": [1]}}},
            ],
        },
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 7, "x": 2.5, "ok": True}}}]},
        {
            "content": "say",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": None, "items": [1, 2], "text": "7"}}}
            ],
        },
        {
            "content": "end",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": [1, 2, "z"]}}}],
        },
        {
            "content": "one | two",
            "note": {"a": 1, "b": 2},
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"q": 'it\'s "quoted"', "r": 3}}}
            ],
        },
        {},
    ][number]
    spec, prompt, text = TEXTS[number]
    assert ResponseTemplate(spec).parse(prompt, text, TOOLS)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_values_equal_those_of_transformers(number):
    from transformers.utils.chat_parsing import parse_response

    spec, prompt, text = TEXTS[number]
    assert ResponseTemplate(spec).parse(prompt, text, TOOLS)[0] == parse_response(
        text, spec, prefix=prompt, tools=TOOLS
    )


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                '{"name":"f","arguments":{}}',
                "<|im_end|>",
                " a",
                "\n",
            ]
        ),
        max_size=9,
    )
)
@settings(max_examples=400, deadline=None)
def test_any_order_of_marks_parses_as_in_transformers(pieces):
    from transformers.utils.chat_parsing import parse_response

    text = "".join(pieces)
    try:
        expected = parse_response(text, HERMES, prefix="<|im_start|>assistant\n")
    except (ValueError, KeyError) as error:
        expected = type(error)
    try:
        found = ResponseTemplate(HERMES).parse("<|im_start|>assistant\n", text)[0]
    except (ValueError, KeyError) as error:
        found = type(error)
    assert found == expected


@given(st.text(max_size=30) | st.text(alphabet='<tool_cal>{"nameruts:}/ \\ud8', max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_sampled_text_is_an_error(text):
    reply = ReplyParser(TOKENIZER, HERMES).parse("<|im_start|>assistant\n", text, TOKENIZER.encode(text))
    sent = json.dumps(reply.wire(), ensure_ascii=False, allow_nan=False).encode()
    assert json.loads(sent) == reply.wire()
    assert reply.parse_failure is None or reply.content == text


def test_marks_of_no_width_close_an_empty_region_and_do_not_turn_in_a_circle():
    fields = {"r": {"open": "<t>", "close_pattern": "(?=<c>)"}, "c": {"open": "<c>", "close": "</c>"}, "x": {}}
    assert ResponseTemplate({"start_anchor": "A", "fields": fields}).parse("A", "<t><c>1</c>q")[0] == {
        "c": "1",
        "x": "q",
    }
    circle = {"r": {"open_pattern": "(?=<)", "close_pattern": "(?=<)"}, "x": {}}
    assert ResponseTemplate({"start_anchor": "A", "fields": circle}).parse("A", "ab<c>")[0] == {"x": "ab"}


def test_a_value_that_its_pattern_leaves_out_is_empty():
    arguments = {"tag_pattern": "<(?P<key>\\w+)(=(?P<value>\\w+))?>"}
    fields = {"c": {"open": "[", "close": "]", "content": "xml-inline", "content_args": arguments}}
    assert ResponseTemplate({"start_anchor": "A", "fields": fields}).parse("A", "[<a=1><b>]")[0] == {
        "c": {"a": "1", "b": ""}
    }


def test_a_tool_schema_that_is_none_casts_nothing():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": 5, "anyOf": 3}}}}}
    text = '<tool_call>{"name": "f", "arguments": {"n": "1"}}</tool_call>'
    reply = ReplyParser(TOKENIZER, HERMES).parse("", text, TOKENIZER.encode(text), [tool])
    assert [call.arguments for call in reply.tool_calls] == ['{"n": "1"}']


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f"}',
        "[]",
        "[" * 5000,
    ],
)
def test_calls_that_cannot_go_over_the_wire_are_failures(call):
    text = f"<tool_call>{call}</tool_call>"
    reply = ReplyParser(TOKENIZER, HERMES).parse("", text, TOKENIZER.encode(text))
    assert reply.parse_failure and reply.content == text
    assert "ud800" not in call or "surrogates not allowed" in reply.parse_failure


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"start_anchor": "x"}, "has no fields"),
        ({"start_anchor": "x", "fields": {"a": {"opn": "y"}}}, "unknown keys"),
        ({"start_anchor": "x", "fields": {"a": {}, "b": {}}}, "at most one"),
        ({"fields": {"a": {}}}, "needs start_anchor"),
        ({"start_anchor": "x", "fields": {"a": {"content": "yaml"}}}, "content parser 'yaml'"),
        ({"start_anchor": "x", "fields": {"a": {"open_pattern": "("}}}, "no regular expression"),
        ({"start_anchor": "x", "fields": ["a"]}, "fields: list found"),
        ({"start_anchor": "x", "fields": {"a": {}}, "defaults": 3}, "defaults: int found"),
        ({"start_anchor": "x", "fields": {"a": {"open": 3}}}, "open must be text"),
        ({"start_anchor": "x", "fields": {"a": {"open_pattern": 3}}}, "no regular expression"),
        ({"start_anchor": "x", "fields": {"a": {"content": "xml-inline"}}}, "tag_pattern None is no regular"),
        (
            {"start_anchor": "x", "fields": {"a": {"content": "xml-inline", "content_args": {"tag_pattern": "a"}}}},
            "no group named key",
        ),
        (
            {"start_anchor": "x", "fields": {"a": {"content": "kv-lines", "content_args": {"kv_sep": ""}}}},
            "kv_sep is empty",
        ),
        (
            {
                "start_anchor": "x",
                "fields": {"a": {"content": "kv-lines", "content_args": {"value_parser": {"name": "z"}}}},
            },
            "content parser 'z'",
        ),
        ({"version": 2, "start_anchor": "x", "fields": {"a": {}}}, "version 2 found, 1 expected"),
    ],
)
def test_a_template_that_is_not_understood_is_refused(spec, message):
    with pytest.raises(ResponseTemplateError, match=message):
        ResponseTemplate(spec)


def test_the_older_response_schema_is_named_in_a_warning(tmp_path, caplog):
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text((MODEL / name).read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"response_schema": {}}')
    ReplyParser(Tokenizer(tmp_path))
    assert "Give tokenizer_config.json a `response_template`" in caplog.text
