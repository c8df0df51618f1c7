"""Multi-turn token cases with literal ids: what the engine is given, and what may be trained on."""

import json

import pytest
from toys import (
    EngineSays,
    ask,
    bytes_with_halved_emoji,
    c,
    calculator_policy,
    chatml_policy,
    letters,
    policy,
    rows,
    session,
    user,
)

from megatron_agentrl.gateway.session import EngineReplyError

TURNS = "{% for m in messages %}{{ {'user': '①', 'assistant': '②'}[m.role] }}{{ m.content }}③④{% endfor %}{% if add_generation_prompt %}②{% endif %}"
TURNS = TURNS.replace("①", c(1)).replace("②", c(2)).replace("③", c(3)).replace("④", c(4))


def turns(tmp_path, stop=(3,)):
    return letters(tmp_path, special=[1, 2, 3, 7], stop=list(stop), template=TURNS)


def test_sampled_ids_stay_when_their_text_encodes_differently(tmp_path):
    symbols = ["r", "e", "i", "n", "t", "re", "in", "it", "rein", "init", "|"]
    merges = [["r", "e"], ["i", "n"], ["re", "in"], ["i", "t"], ["in", "it"]]
    end = {
        "id": 11,
        "content": "<e>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    vocab = {symbol: n for n, symbol in enumerate(symbols)}
    toy = policy(
        tmp_path,
        vocab,
        merges,
        [end],
        {"type": "Fuse"},
        None,
        [11],
        "{% for m in messages %}{{ m.content }}|{% endfor %}",
    )
    assert toy.tokenizer.encode("reinit") == [8, 7]
    s = session(toy)
    prompt, message = ask(s, [user("t")], EngineSays([5, 9], [-0.2, -1.1]))
    assert message["content"] == "reinit"
    following, _ = ask(s, [user("t"), message, user("t")], EngineSays([11]))
    assert following == [*prompt, 5, 9, 10, 4, 10]
    assert rows(s)[0].token_ids[: len(prompt) + 2] == [4, 10, 5, 9]
    assert rows(s)[0].logprobs[2:4] == [-0.2, -1.1]


def test_half_an_emoji_is_one_trained_id_and_its_replacement_character_is_never_encoded(tmp_path):
    toy = bytes_with_halved_emoji(tmp_path, "{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    s = session(toy)
    prompt, message = ask(s, [user("hi")], EngineSays([256], [-0.7], finish_reason="length"))
    assert message["content"] == "\ufffd"
    following, _ = ask(s, [user("hi"), message, user("\U0001f600")], EngineSays([258]))
    assert following == [104, 105, 258, 256, 258, 256, 257, 258]
    (row,) = rows(s)
    assert (row.token_ids[3], row.loss_mask[3], row.logprobs[3]) == (256, 1, -0.7)
    assert not {0xEF, 0xBF, 0xBD} & set(following)


@pytest.mark.parametrize("missing", ["ids", "logprobs", "versions"])
def test_a_reply_without_its_columns_fails_and_is_never_encoded(tmp_path, missing):
    s = session(turns(tmp_path))
    pending = s.plan({"messages": [user(c(10))]})
    says = EngineSays([20, 3])
    setattr(says, missing, [])
    with pytest.raises(EngineReplyError, match=f"has no {missing}"):
        s.commit(pending, says)
    assert rows(s) == []


def test_columns_of_unequal_length_fail_and_the_retry_sees_the_same_context(tmp_path):
    s = session(turns(tmp_path))
    prompt, message = ask(s, [user(c(10))], EngineSays([20, 3]))
    history = [user(c(10)), message, user(c(11))]
    failed = s.plan({"messages": history})
    with pytest.raises(EngineReplyError, match="unequal length"):
        s.commit(failed, EngineSays([21, 22, 3], [-0.1, -0.2]))
    again, _ = ask(s, history, EngineSays([23, 3]))
    assert again == failed.prompt_ids == [*prompt, 20, 3, 4, 1, 11, 3, 4, 2]
    assert len(rows(s)) == 1


RAW_CALL = '<call>{"lo":2 , "hi": 9,"note":"<é>"}</call>'


@pytest.mark.parametrize(
    "dumps",
    [
        str,
        lambda a: json.dumps(json.loads(a), separators=(",", ":")),
        lambda a: json.dumps(json.loads(a), sort_keys=True),
    ],
)
def test_a_tool_call_stays_as_sampled_however_its_arguments_are_written_back(dumps):
    toy = chatml_policy()
    encode = toy.tokenizer.encode
    s = session(toy)
    prompt, message = ask(s, [user("go")], EngineSays(encode(RAW_CALL)))
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"lo": 2, "hi": 9, "note": "<é>"}
    echoed = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call, "function": {"name": "f", "arguments": dumps(call["function"]["arguments"])}}],
    }
    following, _ = ask(
        s,
        [user("go"), echoed, {"role": "tool", "tool_call_id": call["id"], "content": "5"}],
        EngineSays(encode("ok<eos>")),
    )
    assert following == prompt + encode(RAW_CALL) + encode("<eos>\n<user>tool\n5<eos>\n<user>assistant\n")
    assert s.splits == []


def test_edited_arguments_are_new_context_in_a_new_row():
    toy = chatml_policy()
    s = session(toy)
    _, message = ask(s, [user("go")], EngineSays(toy.tokenizer.encode(RAW_CALL)))
    edited = json.loads(json.dumps(message).replace('\\"lo\\": 2', '\\"lo\\": 3'))
    assert edited != message
    following, _ = ask(
        s, [user("go"), edited, {"role": "tool", "tool_call_id": "x", "content": "5"}], EngineSays([265])
    )
    assert s.splits == ["history"]
    assert toy.tokenizer.decode(following).startswith(
        '<user>user\ngo<eos>\n<user>assistant\n<call>{"lo": 3, "hi": 9, "note": "<é>"}</call>'
    )
    assert rows(s)[1].loss_mask == [0] * len(following) + [1]


@pytest.mark.parametrize("cut", ['<call>{"lo": ', '<call>{"lo": 2', "<call>nonsense</call>", "<call>[1]</call>"])
def test_a_call_that_cannot_be_parsed_is_text_with_a_reason_and_the_conversation_goes_on(cut):
    toy = chatml_policy()
    encode = toy.tokenizer.encode
    s = session(toy)
    reason = "stop" if cut.endswith("</call>") else "length"
    prompt, message = ask(s, [user("go")], EngineSays(encode(cut), finish_reason=reason))
    assert message["content"].startswith(cut.removesuffix("</call>"))
    assert message["parse_failure"] and "tool_calls" not in message
    following, _ = ask(s, [user("go"), message, user("again")], EngineSays(encode("ok<eos>")))
    assert following[: len(prompt) + len(encode(cut))] == prompt + encode(cut)
    assert s.splits == []


def test_a_template_that_drops_earlier_thinking_gives_two_rows(tmp_path):
    template = "{% for m in messages %}1{{ '' if m.role == 'user' else '2' }}{{ m.content }}3{% endfor %}{% if add_generation_prompt %}12{% endif %}"
    template = (
        template.replace("12", c(1, 20))
        .replace("1{", c(1) + "{")
        .replace("'2'", f"'{c(20)}'")
        .replace("}3", "}" + c(2))
    )
    spec = {
        "start_anchor": c(1, 20),
        "fields": {"reasoning_content": {"open": c(50), "close": c(52)}, "content": {"close": c(2)}},
    }
    s = session(letters(tmp_path, [1, 2, 20, 50, 52], [2], template, spec))
    first, message = ask(s, [user(c(10, 11))], EngineSays([50, 51, 52, 60, 61, 2]))
    assert first == [1, 10, 11, 2, 1, 20]
    assert (message["content"], message["reasoning_content"]) == (c(60, 61), c(51))
    second, _ = ask(s, [user(c(10, 11)), message, user(c(12))], EngineSays([50, 53, 52, 62, 2]))
    assert second == [1, 10, 11, 2, 1, 20, 60, 61, 2, 1, 12, 2, 1, 20]
    assert [(len(row.token_ids), sum(row.loss_mask), row.loss_mask.index(1)) for row in rows(s)] == [
        (12, 6, 6),
        (19, 5, 14),
    ]
    assert s.splits == ["template"]


def test_a_turn_cut_by_length_gets_its_closers_as_context(tmp_path):
    s = session(turns(tmp_path))
    _, message = ask(s, [user(c(10))], EngineSays([20, 21, 22], finish_reason="length"))
    ask(s, [user(c(10)), message, user(c(11))], EngineSays([23, 3]))
    (row,) = rows(s)
    assert row.token_ids == [1, 10, 3, 4, 2, 20, 21, 22, 3, 4, 1, 11, 3, 4, 2, 23, 3]
    assert row.loss_mask == [0] * 5 + [1] * 3 + [0] * 7 + [1] * 2
    assert row.finish_reasons == ["length", "stop"]
    assert row.turns == [(5, 8), (15, 17)]
    assert s.over_length is False


def test_a_second_end_token_ends_a_turn_and_is_trained(tmp_path):
    s = session(turns(tmp_path, stop=(3, 7)))
    _, message = ask(s, [user(c(10))], EngineSays([20, 7]))
    assert message["content"] == c(20)
    following, _ = ask(s, [user(c(10)), message, user(c(11))], EngineSays([21, 3]))
    assert following == [1, 10, 3, 4, 2, 20, 7, 3, 4, 1, 11, 3, 4, 2]
    (row,) = rows(s)
    assert row.loss_mask[5:7] == [1, 1] and row.finish_reasons == ["stop", "stop"]


@pytest.mark.parametrize(("prompt_length", "expected"), [(10, 12), (24, 8), (31, 1), (32, 0), (33, 0)])
def test_new_tokens_fit_budget_and_context(tmp_path, prompt_length, expected):
    s = session(turns(tmp_path), max_tokens=100, max_response_tokens=12, context_length=32)
    pending = s.plan({"messages": [user(c(*[10] * (prompt_length - 4)))]})
    assert len(pending.prompt_ids) == prompt_length
    assert pending.max_tokens == expected
    if expected == 0:
        completion = s.commit(pending, None)
        assert (completion.reply.content, completion.wire_finish_reason) == ("", "length")
        assert s.over_length and rows(s) == []


def test_done_tokens_count_once_for_both_bounds(tmp_path):
    s = session(turns(tmp_path), max_tokens=100, max_response_tokens=12, context_length=32)
    _, message = ask(s, [user(c(*[10] * 6))], EngineSays([20, 21, 22, 23, 24, 25, 26], finish_reason="length"))
    pending = s.plan({"messages": [user(c(*[10] * 6)), message, user(c(11))]})
    assert (len(pending.prompt_ids), pending.max_tokens) == (24, 5)
    with pytest.raises(EngineReplyError, match="6 tokens sampled, 5 allowed"):
        s.commit(pending, EngineSays([30] * 6))
    ask(s, [user(c(*[10] * 6)), message, user(c(11))], EngineSays([30] * 5, finish_reason="length"))
    assert sum(sum(row.loss_mask) for row in rows(s)) == 12
    assert s.over_length


def test_a_tool_result_that_fits_after_the_last_budgeted_token_stays_in_the_row(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    s = session(letters(tmp_path, [1, 3], [3], template), max_tokens=100, max_response_tokens=3)
    _, message = ask(s, [user(c(1, 10))], EngineSays([31, 32, 33]))
    pending = s.plan(
        {"messages": [user(c(1, 10)), message, {"role": "tool", "tool_call_id": "x", "content": c(41, 42)}]}
    )
    assert pending.max_tokens == 0
    s.commit(pending, None)
    (row,) = rows(s)
    assert (row.token_ids[2:], row.loss_mask[2:]) == ([31, 32, 33, 41, 42], [1, 1, 1, 0, 0])


def test_three_turns_give_the_mask_of_the_definition(tmp_path):
    template = "{% for m in messages %}{{ {'user': '1', 'tool': '6', 'assistant': ''}[m.role] }}{{ m.content }}{% if m.role == 'assistant' %}3{% endif %}{% endfor %}{% if add_generation_prompt %}2{% endif %}"
    template = (
        template.replace("'1'", f"'{c(1)}'")
        .replace("'6'", f"'{c(6)}'")
        .replace("}3{", "}" + c(3) + "{")
        .replace("}2{", "}" + c(2) + "{")
    )
    template = template.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}" + c(2) + "{% endif %}{{ m.content }}"
    )
    s = session(letters(tmp_path, [1, 2, 3, 6], [3], template))
    history = [user(c(10, 11, 12))]
    for sampled, result in (([20, 21, 3], c(30, 31)), ([22, 3], c(32)), ([23, 3], None)):
        _, message = ask(s, history, EngineSays(sampled))
        history += [message, {"role": "tool", "tool_call_id": "x", "content": result}]
    (row,) = rows(s)
    assert len(row.token_ids) == 19
    assert row.turns == [(5, 8), (12, 14), (17, 19)]
    shifted = [position for position, trained in enumerate(row.loss_mask[1:]) if trained]
    assert shifted == [4, 5, 6, 11, 12, 16, 17]


def test_five_samples_of_one_request_are_five_branches():
    toy = chatml_policy()
    s = session(toy)
    prompts = [ask(s, [user("go")], EngineSays([97 + n, 265]))[0] for n in range(5)]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert [row.token_ids[-2:] for row in rows(s)] == [[97 + n, 265] for n in range(5)]
    assert [row.split_reason for row in rows(s)] == [None] + ["branch"] * 4


def test_a_turn_continued_twice_trains_its_tokens_once():
    toy = chatml_policy()
    s = session(toy)
    _, message = ask(s, [user("go")], EngineSays([97, 265]))
    one, _ = ask(s, [user("go"), message, user("a")], EngineSays([98, 265]))
    other, _ = ask(s, [user("go"), message, user("b")], EngineSays([99, 265]))
    assert [sum(row.loss_mask) for row in rows(s)] == [4, 2]
    assert rows(s)[1].token_ids == other + [99, 265]
    assert one[: len(one) - 20] == other[: len(one) - 20]


def test_overlapping_requests_of_one_turn_become_branches_and_lose_nothing():
    toy = chatml_policy()
    s = session(toy)
    _, message = ask(s, [user("go")], EngineSays([97, 265]))
    plans = [s.plan({"messages": [user("go"), message, user("a")]}) for _ in range(3)]
    for plan, token in zip(reversed(plans), (100, 101, 102), strict=True):
        s.commit(plan, EngineSays([token, 265]))
    assert sorted(row.token_ids[-2] for row in rows(s)) == [100, 101, 102]
    assert sum(sum(row.loss_mask) for row in rows(s)) == s.sampled_tokens == 8


def test_two_tool_results_of_one_request_are_both_in_the_next_prompt():
    toy = chatml_policy()
    s = session(toy)
    _, message = ask(s, [user("go")], EngineSays(toy.tokenizer.encode('<call>{"a":1}</call>')))
    results = [
        {"role": "tool", "tool_call_id": "x", "content": "first"},
        {"role": "tool", "tool_call_id": "y", "content": "second"},
    ]
    following, _ = ask(s, [user("go"), message, *results], EngineSays([265]))
    assert toy.tokenizer.decode(following).endswith(
        "<user>tool\nfirst<eos>\n<user>tool\nsecond<eos>\n<user>assistant\n"
    )


def test_another_tool_list_is_another_conversation():
    s = session(chatml_policy())
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    _, message = ask(s, [user("go")], EngineSays([97, 265]))
    ask(s, [user("go"), message, user("a")], EngineSays([98, 265]), tools=[tool])
    assert s.splits == ["history"]


def test_the_calculator_conversation_is_the_token_sequence_of_the_task():
    toy = calculator_policy()
    decode, encode = toy.tokenizer.decode, toy.tokenizer.encode
    s = session(toy)
    history = [user("63+43*9=?")]
    for sampled, result in (("<call>63+43</call>", "106"), ("<call>106*9</call>", "954"), ("<ans>954<eos>", None)):
        prompt, message = ask(s, history, EngineSays(encode(sampled)))
        history += [message, {"role": "tool", "tool_call_id": "x", "content": result}]
    assert message == {"role": "assistant", "content": "954"}
    (row,) = rows(s)
    expected = "<bos><user>63+43*9=?<asst><call>63+43</call><res>106</res><call>106*9</call><res>954</res><ans>954<eos>"
    assert decode(row.token_ids) == expected
    assert (
        decode([id for id, trained in zip(row.token_ids, row.loss_mask, strict=True) if trained])
        == "<call>63+43</call><call>106*9</call><ans>954<eos>"
    )
    assert row.token_ids[:3] == [257, 258, ord("6")] and row.token_ids[-1] == 265
