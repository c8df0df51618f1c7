"""The token invariant over random conversations: nested, edited, branched, overlapping, cut, failing."""

from hypothesis import given, settings
from hypothesis import strategies as st
from toys import EngineSays, calculator_policy, chatml_policy, rows, session, user

from megatron_agentrl.gateway.session import EngineReplyError

CHATML, CALCULATOR = chatml_policy(), calculator_policy()
SPECIAL = [260, 261, 262, 263, 264]

texts = st.one_of(
    st.text(alphabet='ab 1\n"{}<é', max_size=6),
    st.sampled_from(['<call>{"a": 1 }</call>', "<call>{", "<call>1+2</call>", "<think>x</think>y", "<ans>3", "\ufffd"]),
)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "from": st.integers(0, 8),
            "say": texts,
            "more": st.lists(texts, min_size=1, max_size=2),
            "raw": st.lists(st.one_of(st.integers(0, 255), st.sampled_from(SPECIAL)), max_size=3),
            "stop": st.booleans(),
            "settle": st.sampled_from(["now", "now", "now", "later", "fail", "abandon"]),
            "edit": st.sampled_from([False, False, False, True]),
        }
    ),
    min_size=1,
    max_size=8,
)


@given(steps=steps, policy=st.sampled_from([CHATML, CALCULATOR]))
@settings(max_examples=150, deadline=None)
def test_each_sampled_token_stands_once_behind_exactly_the_ids_the_engine_was_given(steps, policy):
    s = session(policy)
    histories = [[user("q")]]
    answered, later = [], []
    serial = 0

    def settle(pending, says, history):
        completion = s.commit(pending, says)
        answered.append((pending.prompt_ids, says))
        histories.append([*history, completion.reply.wire()])

    for step in steps:
        history = list(histories[step["from"] % len(histories)])
        if history[-1]["role"] == "assistant":
            asked = history[-1].get("tool_calls")
            role = {"role": "tool", "tool_call_id": asked[0]["id"]} if asked else {"role": "user"}
            history += [{**role, "content": text} for text in step["more"]]
        if step["edit"]:
            history[0] = user("edited")
        pending = s.plan({"messages": history})
        ids = policy.tokenizer.encode(step["say"]) + step["raw"] + ([265] if step["stop"] else []) or [97]
        says = EngineSays(
            ids, [-1.0 - serial - n for n in range(len(ids))], finish_reason="stop" if step["stop"] else "length"
        )
        serial += len(ids)
        if step["settle"] == "now":
            settle(pending, says, history)
        elif step["settle"] == "later":
            later.append((pending, says, history))
        elif step["settle"] == "abandon":
            s.abandon(pending)
        else:
            try:
                s.commit(pending, EngineSays(ids, [float("nan")] * len(ids)))
            except EngineReplyError:
                continue
            raise AssertionError("a reply of NaNs was recorded")
    for pending, says, history in later:
        settle(pending, says, history)

    recorded = {}
    for row in rows(s):
        assert sum(row.loss_mask) == sum(stop - start for start, stop in row.turns) > 0
        for start, stop in row.turns:
            recorded[row.logprobs[start]] = (row.token_ids[:start], row.token_ids[start:stop], row.logprobs[start:stop])
    assert len(recorded) == len(answered)
    for prompt, says in answered:
        assert recorded[says.logprobs[0]] == (prompt, says.ids, says.logprobs)
    assert s.sampled_tokens == sum(len(says.ids) for _, says in answered)
    assert all(row.split_reason in ("history", "branch", "template") for row in rows(s)[1:])
    assert rows(s) == [] or rows(s)[0].split_reason is None


@given(texts=st.lists(st.text(alphabet='ab1+-*"\\{}é\n ', max_size=8), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_plain_conversation_is_one_row(texts):
    s = session(CHATML)
    history = [user("q")]
    for text in texts:
        pending = s.plan({"messages": history})
        completion = s.commit(pending, EngineSays([*CHATML.tokenizer.encode(text), 265]))
        history += [completion.reply.wire(), user(text)]
    assert len(rows(s)) == 1
    assert len(rows(s)[0].turns) == len(texts)


@given(
    budget=st.integers(1, 20),
    context=st.integers(5, 60),
    wanted=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    overlap=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_budgets_hold_for_any_order_of_requests(budget, context, wanted, overlap):
    s = session(CALCULATOR, max_tokens=9, max_response_tokens=budget, context_length=context)
    pending = []
    for want in wanted:
        turn = s.plan({"messages": [user("1+1=?")], "max_tokens": want})
        assert turn.max_tokens <= want
        assert len(turn.prompt_ids) + turn.max_tokens <= max(context, len(turn.prompt_ids))
        pending.append(turn)
        if not overlap:
            turn = pending.pop()
            s.commit(turn, EngineSays([97] * turn.max_tokens, finish_reason="length") if turn.max_tokens else None)
    for turn in pending:
        s.commit(turn, EngineSays([97] * turn.max_tokens, finish_reason="length") if turn.max_tokens else None)
    assert s.sampled_tokens <= budget
    assert all(len(row.token_ids) <= context for row in rows(s))
