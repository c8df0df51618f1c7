"""The gateway over HTTP: the real openai client on one side, a scripted engine on the other."""

import asyncio
import json
from functools import partial

import msgspec
import openai
import pytest
from serving import TOKEN, ScriptedEngine, serving
from toys import EngineSays, calculator_policy, user

from examples.calculator.agent import CalculatorAgent
from megatron_agentrl.agent.endpoint import Endpoint, PolicyClient, shared_client
from megatron_agentrl.agent.types import Task
from megatron_agentrl.trajectory.spool import SpoolError, SpoolReader
from megatron_agentrl.trajectory.types import Receipt

POLICY = calculator_policy()
encode, decode = POLICY.tokenizer.encode, POLICY.tokenizer.decode
QUESTION = {"model": "policy", "messages": [user("63+43*9=?")]}
ANSWER = encode("<ans>954<eos>")


def solves(ids, _):
    """A policy that computes 63+43*9 through the tool."""
    text = decode(ids)
    return encode(
        "<ans>954<eos>" if "<res>954" in text else "<call>106*9</call>" if "<res>106" in text else "<call>63+43</call>"
    )


def run(scenario, engine, run_dir, **more):
    async def inside():
        async with asyncio.timeout(20), serving(POLICY, engine, run_dir, **more) as client:
            return await scenario(client)

    return asyncio.run(inside())


def receipt_of(body) -> Receipt:
    return msgspec.convert(body, Receipt, strict=False)


def trajectory_of(run_dir, body):
    return SpoolReader(run_dir).read(receipt_of(body).where)


@pytest.mark.parametrize("make", ["library client", "pooled client"])
def test_the_calculator_agent_runs_through_the_whole_gateway(tmp_path, make):
    engine = ScriptedEngine(solves)

    async def scenario(client):
        opened = await client.open(sample=5)
        endpoint = Endpoint(
            opened["openai_base_url"], opened["api_key"], 4, client.http, shared_client(client.http, 10.0)
        )
        if make == "library client":
            plain = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
            endpoint.openai = lambda: plain
        result = await CalculatorAgent().run(Task("task", [user("63+43*9=?")], "954"), endpoint)
        status, body = await client.finish(opened, reward=result.reward, metrics=result.metrics)
        assert status == 200
        return result, body

    result, body = run(scenario, engine, tmp_path)
    assert (result.reward, result.metrics) == (1.0, {"through_tool": 1.0, "tool_rate": 1.0})
    assert [asked["max_tokens"] for asked in engine.asked] == [14, 14, 14]
    assert engine.asked[0]["stop"] == [261, 265]
    receipt = receipt_of(body)
    assert (receipt.sample, receipt.status, receipt.reward, receipt.sampled) == (5, "ok", 1.0, {7: 19})
    trajectory = trajectory_of(tmp_path, body)
    (row,) = trajectory.segments
    assert decode(row.token_ids).endswith("<res>954</res><ans>954<eos>")
    assert receipt.lengths == [len(row.token_ids)]
    assert trajectory.metrics == {"through_tool": 1.0, "tool_rate": 1.0}


def test_a_retry_gets_the_stored_reply_and_a_repetition_gets_a_sample(tmp_path):
    engine = ScriptedEngine(lambda ids, n: encode(f"<ans>{n}<eos>"))

    async def scenario(client):
        opened = await client.open()
        _, first = await client.chat(opened, QUESTION)
        _, retried = await client.chat(opened, QUESTION, x_stainless_retry_count="1")
        assert retried == first
        _, keyed = await client.chat(opened, QUESTION, idempotency_key="k")
        _, again = await client.chat(opened, QUESTION, idempotency_key="k")
        assert keyed == again and keyed != first
        status, _ = await client.chat(opened, {**QUESTION, "max_tokens": 5}, idempotency_key="k")
        assert status == 409
        for _ in range(3):
            await client.chat(opened, QUESTION)
        return (await client.finish(opened))[1]

    body = run(scenario, engine, tmp_path)
    assert len(engine.asked) == 5
    assert [decode(row.token_ids[-3:-1]) for row in trajectory_of(tmp_path, body).segments] == [
        f"<ans>{n}" for n in range(5)
    ]


def test_retries_that_overlap_their_request_join_it(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER, delay=0.1)

    async def scenario(client):
        opened = await client.open()
        first = asyncio.create_task(client.chat(opened, QUESTION))
        await asyncio.sleep(0.03)
        retried = await client.chat(opened, QUESTION, x_stainless_retry_count="1")
        assert (await first) == retried
        return (await client.finish(opened))[1]

    assert run(scenario, engine, tmp_path)["sampled"] == {"7": 5}
    assert len(engine.asked) == 1


def test_a_dropped_connection_leaves_no_tokens_and_its_retry_one_turn(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER, delay=0.2)

    async def scenario(client):
        opened = await client.open()
        dropped = asyncio.create_task(client.chat(opened, QUESTION))
        await asyncio.sleep(0.05)
        dropped.cancel()
        while not engine.cancelled:
            await asyncio.sleep(0.01)
        assert (await client.stats())["in_flight"] == 0
        status, _ = await client.chat(opened, QUESTION, x_stainless_retry_count="1")
        assert status == 200
        return (await client.finish(opened))[1]

    body = run(scenario, engine, tmp_path)
    assert len(engine.asked) == 2 and engine.asked[0] == engine.asked[1]
    assert len(trajectory_of(tmp_path, body).segments) == 1
    assert body["sampled"] == {"7": 5}


@pytest.mark.parametrize(
    "fault", [RuntimeError("engine-0 died"), EngineSays([263, 265], versions=[7]), EngineSays([263], [float("nan")])]
)
def test_an_engine_failure_is_502_and_the_clients_own_retry_gets_the_same_context(tmp_path, fault):
    engine = ScriptedEngine(lambda ids, n: fault if n == 0 else ANSWER)

    async def scenario(client):
        opened = await client.open()
        status, body = await client.chat(opened, QUESTION)
        assert (status, body["error"]["type"]) == (502, "engine_error")
        endpoint = Endpoint(
            opened["openai_base_url"], opened["api_key"], 4, client.http, shared_client(client.http, 10.0)
        )
        reply = await endpoint.openai().chat.completions.create(**QUESTION)
        assert reply.choices[0].message.content == "954"
        return (await client.finish(opened))[1]

    body = run(scenario, engine, tmp_path)
    assert engine.asked[0] == engine.asked[1]
    assert (body["status"], body["sampled"]) == ("ok", {"7": 5})


@pytest.mark.parametrize(("status", "reward"), [("ok", 0.0), ("agent_error", None)])
def test_a_trajectory_whose_last_turn_the_engine_failed_is_never_scored(tmp_path, status, reward):
    engine = ScriptedEngine(lambda ids, n: RuntimeError("engine-0 died"))

    async def scenario(client):
        opened = await client.open()
        await client.chat(opened, QUESTION)
        return (await client.finish(opened, status=status, reward=reward))[1]

    body = run(scenario, engine, tmp_path)
    assert (body["status"], body["reward"], body["where"]) == ("engine_error", None, None)
    assert "engine-0 died" in body["message"]


def test_a_silent_engine_meets_the_turn_deadline(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER, delay=30)

    async def scenario(client):
        return await client.chat(await client.open(), QUESTION)

    status, body = run(scenario, engine, tmp_path, turn_timeout=0.1)
    assert status == 502 and "within 0.1 s" in body["error"]["message"]


REFUSED = [
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 40}, "top_k"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"temperature": 0.7}, "temperature"),
    ({"stream": True}, "stream"),
    ({"n": 2}, "n"),
    ({"stop": ["END."]}, "stop"),
    ({"seed": 1}, "seed"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
]


def test_sampling_that_the_trainer_cannot_reproduce_is_refused_by_name(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER)

    async def scenario(client):
        opened = await client.open()
        return [await client.chat(opened, {**QUESTION, **extra}) for extra, _ in REFUSED]

    replies = run(scenario, engine, tmp_path)
    assert [(status, body["error"]["param"]) for status, body in replies] == [(400, name) for _, name in REFUSED]
    assert engine.asked == []


UNRENDERABLE = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "system", "content": "the template refuses system messages"}]},
    {"messages": [user("x")], "chat_template_kwargs": {"messages": []}},
]


def test_a_request_that_cannot_be_rendered_is_400_and_harmless(tmp_path):
    async def scenario(client):
        opened = await client.open()
        for body in UNRENDERABLE:
            status, reply = await client.chat(opened, {"model": "policy", **body})
            assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), body
        assert (await client.chat(opened, QUESTION))[0] == 200
        return (await client.finish(opened))[1]

    assert run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)["sampled"] == {"7": 5}


def test_neutral_values_and_text_parts_are_accepted(tmp_path):
    neutral = {"top_p": 1, "temperature": 1.0, "n": 1, "stream": False, "logit_bias": None, "user": "someone"}
    engine = ScriptedEngine(lambda ids, n: ANSWER)

    async def scenario(client):
        opened = await client.open()
        parts = [{"type": "text", "text": "63+43*9=?"}]
        return await client.chat(opened, {"model": "policy", "messages": [user(parts)], **neutral})

    status, body = run(scenario, engine, tmp_path)
    assert status == 200 and body["usage"] == {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}
    assert decode(engine.asked[0]["ids"]) == "<bos><user>63+43*9=?<asst>"


def test_keys_open_their_own_door_only(tmp_path):
    async def scenario(client):
        one, other = await client.open(), await client.open()
        chat = "/chat/completions"
        results = [
            await client.call("POST", one["openai_base_url"] + chat, other["api_key"], QUESTION),
            await client.call("POST", one["openai_base_url"] + chat, one["control_key"], QUESTION),
            await client.call("POST", one["openai_base_url"] + chat, TOKEN, QUESTION),
            await client.call("POST", client.url + "/sessions/nobody/v1" + chat, one["api_key"], QUESTION),
            await client.finish(one, key=one["api_key"]),
            await client.finish(one, key=other["control_key"]),
            await client.call("POST", client.url + "/sessions", one["api_key"], {"task_id": "t", "sample": 0}),
            await client.call("GET", client.url + "/stats", one["api_key"]),
            await client.call("PUT", client.url + "/engines/e", one["api_key"], {}),
        ]
        assert len({one["rollout_id"], other["rollout_id"]}) == 2 and len(one["api_key"]) >= 32
        return [status for status, _ in results]

    assert run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path) == [
        401,
        401,
        401,
        404,
        401,
        401,
        401,
        401,
        401,
    ]


def test_finish_is_repeatable_and_closes_the_door(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER, delay=0.05)

    async def scenario(client):
        opened = await client.open()
        await client.chat(opened, QUESTION)
        running = asyncio.create_task(client.chat(opened, QUESTION))
        await asyncio.sleep(0.02)
        first = await client.finish(opened)
        assert await client.finish(opened, reward=0.5) == first
        assert (await running)[0] == 410
        assert (await client.chat(opened, QUESTION))[0] == 404
        return first[1]

    body = run(scenario, engine, tmp_path)
    assert (body["reward"], body["sampled"]) == (1.0, {"7": 5})


NONSENSE = [{"status": "fine"}, {"reward": None}, {"status": "timeout", "reward": 0.0}, {"rewrad": 1.0}]


@pytest.mark.parametrize(
    "more",
    [
        '"tools": ["x"]',
        '"tools": "abc"',
        '"metadata": ' + "[" * 50_000 + "]" * 50_000,
        '"tools": [{"parameters": ' + "[" * 50_000 + "]" * 50_000 + "}]",
    ],
)
def test_a_request_of_the_wrong_shape_is_400_before_anything_is_sampled(tmp_path, more):
    engine = ScriptedEngine(lambda ids, n: ANSWER)

    async def scenario(client):
        opened = await client.open()
        body = '{"messages": [{"role": "user", "content": "1+1=?"}], ' + more + "}"
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        async with client.http.post(
            opened["openai_base_url"] + "/chat/completions", data=body, headers=headers
        ) as response:
            return response.status, (await response.json())["error"]["type"]

    assert run(scenario, engine, tmp_path) == (400, "invalid_request_error")
    assert engine.asked == []


def test_any_template_name_and_any_depth_of_arguments_is_taken(tmp_path):
    async def scenario(client):
        opened = await client.open()
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "calculator", "arguments": "[" * 50_000 + "]" * 50_000},
        }
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        deep = await client.chat(opened, {"messages": [user("q"), turn, user("r")]})
        named = await client.chat(opened, {**QUESTION, "chat_template_kwargs": {"self": 1}})
        return deep[0], named[0]

    assert run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path) == (200, 200)


def test_a_trajectory_that_cannot_be_stored_says_so_and_can_be_finished_again(tmp_path):
    async def scenario(client):
        opened = await client.open()
        await client.chat(opened, QUESTION)
        registry = client.gateway.registry
        write = registry._write
        registry._write = full
        refused = await client.finish(opened)
        registry._write = write
        return refused, await client.finish(opened)

    def full(_):
        raise SpoolError("spool/gateway-0-000000.spool: 3 of 90 bytes written at 0; is the disk full?")

    (status, body), (again, receipt) = run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)
    assert (status, body["error"]["type"]) == (500, "storage_error")
    assert body["error"]["message"].endswith("is the disk full?")
    assert (again, receipt["status"], receipt["sampled"]) == (200, "ok", {"7": 5})


def test_an_agent_may_copy_and_close_its_client(tmp_path):
    async def scenario(client):
        opened = await client.open()
        endpoint = Endpoint(
            opened["openai_base_url"], opened["api_key"], 4, client.http, shared_client(client.http, 10.0)
        )
        async with endpoint.openai() as first:
            await first.with_options(max_retries=0, timeout=5).chat.completions.create(**QUESTION)
        with pytest.raises(openai.BadRequestError):  # the library's own path still has its connections
            await endpoint.openai().chat.completions.create(**QUESTION, top_p=0.5)

    run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)


def test_a_finish_that_makes_no_sense_is_400_and_leaves_the_session_open(tmp_path):
    async def scenario(client):
        opened = await client.open()
        assert [(await client.finish(opened, **body))[0] for body in NONSENSE] == [400] * 4
        assert (await client.finish(opened))[0] == 200

    run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)


def test_a_failed_trajectory_has_a_receipt_without_a_place(tmp_path):
    async def scenario(client):
        opened = await client.open()
        await client.chat(opened, QUESTION)
        return (await client.finish(opened, status="timeout", reward=None, message="late"))[1]

    body = run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)
    assert (body["status"], body["reward"], body["where"], body["message"]) == ("timeout", None, None, "late")


def test_a_used_up_budget_is_a_normal_reply_and_marks_the_trajectory(tmp_path):
    engine = ScriptedEngine(lambda ids, n: EngineSays(encode("<ans>12345"), finish_reason="length"))

    async def scenario(client):
        opened = await client.open(max_response_tokens=6)
        _, one = await client.chat(opened, QUESTION)
        _, two = await client.chat(opened, QUESTION)
        assert two["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"] == "length"
        assert two["choices"][0]["message"]["content"] == ""
        return (await client.finish(opened, reward=0.0))[1]

    body = run(scenario, engine, tmp_path)
    assert (body["status"], body["reward"], len(engine.asked)) == ("over_length", 0.0, 1)


def test_an_eval_session_has_its_own_temperature_and_a_training_session_has_not(tmp_path):
    engine = ScriptedEngine(lambda ids, n: ANSWER)

    async def scenario(client):
        greedy = await client.open(kind="eval", sampling={"temperature": 0.0})
        await client.chat(greedy, QUESTION)
        await client.chat(await client.open(), QUESTION)
        url = client.url + "/sessions"
        refused = [
            {"task_id": "t", "sample": 0, "sampling": {"temperature": 0.5}},
            {"task_id": "t", "sample": 0, "sampling": {"top_p": 0.5}},
            {"task_id": "t", "sample": 0, "kind": "test"},
            {"task_id": "t", "sample": 0, "max_response_tokens": 0},
            {"task_id": "t", "sample": 0, "temprature": 1},
        ]
        return [(await client.call("POST", url, body=body))[0] for body in refused]

    assert run(scenario, engine, tmp_path) == [400] * 5
    assert [asked["temperature"] for asked in engine.asked] == [0.0, 1.0]


def test_stats_count_tokens_splits_and_busy_time_and_spans_are_recorded(tmp_path):
    spans = []
    engine = ScriptedEngine(lambda ids, n: ANSWER, delay=0.05)

    async def scenario(client):
        opened = await client.open()
        for _ in range(2):
            await client.chat(opened, QUESTION)
        await client.finish(opened)
        return await client.stats()

    stats = run(scenario, engine, tmp_path, record=lambda *span: spans.append(span))
    assert (stats["tokens_sampled"], stats["splits"], stats["finished"]) == (10, {"branch": 1}, {"ok": 1})
    assert 0.1 <= stats["busy"]["seconds"] < 1.0 and 0 < stats["busy"]["fraction"] < 1
    assert {name for name, _, _ in spans} == {"engine_busy"}
    assert sum(stop - start for _, start, stop in spans) == pytest.approx(stats["busy"]["seconds"], abs=0.02)


def test_a_session_nobody_finishes_is_dropped(tmp_path):
    async def scenario(client):
        opened = await client.open()
        while (await client.stats())["sessions"]:
            await asyncio.sleep(0.02)
        return (await client.finish(opened))[0], (await client.stats())["expired"]

    assert run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path, idle_timeout=0.1) == (404, 1)


def test_engine_updates_reach_the_pool(tmp_path):
    seen = []

    async def update(name, body):
        if body.get("state") not in ("serving", "none"):
            raise ValueError("state: expected serving or none")
        seen.append((name, body))

    async def scenario(client):
        url = client.url + "/engines/engine-0"
        good = await client.call("PUT", url, body={"url": "http://e", "state": "serving", "version": 3})
        return good[0], (await client.call("PUT", url, body={"state": "x"}))[0]

    assert run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path, update_engine=update) == (200, 400)
    assert seen == [("engine-0", {"url": "http://e", "state": "serving", "version": 3})]


def test_the_pooled_client_sends_what_the_library_sends(tmp_path):
    seen = []

    async def scenario(client):
        opened = await client.open()
        plan = client.gateway.registry.for_agent(opened["rollout_id"], opened["api_key"]).session.plan

        def watch(request):
            seen.append(request)
            return plan(request)

        client.gateway.registry.for_agent(opened["rollout_id"], opened["api_key"]).session.plan = watch
        http = shared_client(client.http, 10.0)
        message = None
        for make in (openai.AsyncOpenAI, partial(PolicyClient, client.http)):
            policy = make(base_url=opened["openai_base_url"], api_key=opened["api_key"], http_client=http)
            reply = await policy.chat.completions.create(
                **QUESTION, max_tokens=9, extra_body={"user": "u"}, temperature=openai.omit
            )
            message = reply.choices[0].message
            await policy.chat.completions.create(model="policy", messages=[user("63+43*9=?"), message, user("1+1=?")])

    run(scenario, ScriptedEngine(lambda ids, n: ANSWER), tmp_path)
    assert json.dumps(seen[0], sort_keys=True) == json.dumps(seen[2], sort_keys=True)
    assert seen[1]["messages"][1]["content"] == seen[3]["messages"][1]["content"] == "954"
    assert set(seen[1]) == set(seen[3])
