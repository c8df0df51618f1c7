"""Generation through the client, and the pool's routing, holding and counting."""

import asyncio
import time

import msgspec
import pytest
from scripted_engine import TOKEN, ScriptedEngine, logprob, next_token

from megatron_agentrl.rollout.client import EngineError, GenerateReply, VllmClient, parse_reply
from megatron_agentrl.rollout.pool import EnginePool

ASK = {"max_tokens": 4, "temperature": 1.0, "stop_token_ids": [96]}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def choice(**changes):
    whole = {
        "finish_reason": "stop",
        "token_ids": [4, 5],
        "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -1.5}]},
        "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
    }
    return msgspec.json.encode({"choices": [{k: v for k, v in (whole | changes).items() if v is not None}]})


def test_a_reply_keeps_ids_logprobs_and_the_version_of_each_token():
    assert parse_reply("e", choice()) == GenerateReply([4, 5], [-0.5, -1.5], [7, 8], "stop", "e")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"token_ids": None}, "protocol", "lacks token ids or logprobs"),
        ({"token_ids": []}, "protocol", "lacks token ids or logprobs"),
        ({"logprobs": None}, "protocol", "lacks token ids or logprobs"),
        ({"token_ids": [4, 6]}, "protocol", "2 logprobs do not belong to the 2 token ids"),
        ({"token_ids": [4]}, "protocol", "2 logprobs do not belong to the 1 token ids"),
        ({"weight_versions": None}, "protocol", "cover 0 of 2 tokens"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "protocol", "cover 1 of 2 tokens"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 2}]}, "protocol", "leave gaps or overlap"),
        ({"weight_versions": [{"version": "none", "start": 0, "end": 2}]}, "unversioned", "version 'none'"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "unversioned", "version 'default'"),
        ({"finish_reason": "abort"}, "aborted", "finish_reason 'abort'"),
    ],
)
def test_a_reply_that_lacks_something_is_an_error_and_nothing_is_made_up(changes, kind, message):
    with pytest.raises(EngineError, match=message) as caught:
        parse_reply("e", choice(**changes))
    assert caught.value.kind == kind and caught.value.engine == "e"


def test_two_choices_or_no_json_are_protocol_errors():
    with pytest.raises(EngineError, match="2 choices"):
        parse_reply("e", b'{"choices": [{}, {}]}')
    with pytest.raises(EngineError, match="unreadable reply"):
        parse_reply("e", b"<html>")


def test_the_client_samples_what_the_engine_samples():
    with ScriptedEngine(version="3") as engine:

        async def main():
            client = VllmClient("e", engine.url, TOKEN)
            reply = await client.generate([8], max_tokens=3, temperature=1.0)
            await client.close()
            return reply

        a = next_token(8, 1)
        b = next_token(a, 2)
        c = next_token(b, 3)
        want = [logprob(8, a, 0.0), logprob(a, b, 0.0), logprob(b, c, 0.0)]
        assert run(main()) == GenerateReply([a, b, c], pytest.approx(want), [3, 3, 3], "length", "e")


@pytest.mark.parametrize(
    ("prepare", "kind", "message"),
    [
        (lambda e: e.faults.status.update({"/inference/v1/generate": 503}), "refused", "status 503: scripted failure"),
        (lambda e: e.faults.delay.update({"/inference/v1/generate": 5.0}), "late", "no reply within 0.3 s"),
        (lambda e: e.stop(), "unreachable", "Cannot connect"),
    ],
)
def test_what_goes_wrong_on_the_way_has_a_kind(prepare, kind, message):
    engine = ScriptedEngine(version="3").start()
    prepare(engine)

    async def main():
        client = VllmClient("e", engine.url, TOKEN, timeout=0.3)
        try:
            await client.generate([8], **ASK)
        finally:
            await client.close()

    with pytest.raises(EngineError, match=message) as caught:
        run(main())
    assert caught.value.kind == kind
    if kind != "unreachable":
        engine.stop()


# ---- pool ------------------------------------------------------------------------------------------------------------


class Manual:
    """A client whose replies the test gives out one by one."""

    def __init__(self, name, versions=(1,)):
        self.name = name
        self.versions = list(versions)
        self.open = []

    async def generate(self, token_ids, *, max_tokens, temperature, stop_token_ids=()):
        self.open.append(asyncio.get_running_loop().create_future())
        versions = await self.open[-1]
        return GenerateReply([1] * len(versions), [-1.0] * len(versions), list(versions), "stop", self.name)

    def reply(self, index=0, versions=None):
        self.open.pop(index).set_result(versions or self.versions)

    async def close(self):
        pass


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def pool_of(*clients, wait=5.0, version=1):
    pool = EnginePool(wait=wait)
    for client in clients:
        await pool.add(client.name, client)
        pool.set_state(client.name, "serving", version)
    return pool


def test_requests_go_to_the_engine_with_the_fewest_in_flight():
    async def main():
        a, b = Manual("a"), Manual("b")
        pool = await pool_of(a, b)
        tasks = [asyncio.create_task(pool.generate([1], **ASK)) for _ in range(4)]
        await settle()
        assert (len(a.open), len(b.open)) == (2, 2)
        b.reply()
        await settle()
        tasks.append(asyncio.create_task(pool.generate([1], **ASK)))
        await settle()
        assert (len(a.open), len(b.open)) == (2, 2)
        for client in (a, a, b, b):
            client.reply()
        assert {(await task).engine for task in tasks} == {"a", "b"}
        assert {e.name: e.requests for e in pool.engines.values()} == {"a": 2, "b": 3}

    run(main())


def test_a_request_waits_for_an_engine_and_names_the_states_when_it_waits_in_vain():
    async def main():
        client = Manual("a")
        pool = EnginePool(wait=0.2)
        await pool.add("a", client)
        with pytest.raises(EngineError, match="no engine serves within 0.2 s: a is none") as caught:
            await pool.generate([1], **ASK)
        assert caught.value.kind == "late"
        task = asyncio.create_task(pool.generate([1], **ASK))
        await settle()
        assert client.open == []
        pool.set_state("a", "serving", 1)
        await settle()
        client.reply()
        assert (await task).versions == [1]

    run(main())


def test_a_reply_with_a_version_under_proof_is_held_until_it_is_proven():
    async def main():
        client = Manual("a")
        pool = await pool_of(client)
        task = asyncio.create_task(pool.generate([1], **ASK))
        await settle()
        pool.set_state("a", "held", 2)
        client.reply(versions=[1, 2])
        await settle()
        assert not task.done()
        pool.set_state("a", "serving", 2)
        assert (await task).versions == [1, 2]

    run(main())


def test_a_reply_with_a_withdrawn_version_is_an_error_even_after_the_engine_recovered():
    async def main():
        client = Manual("a")
        pool = await pool_of(client)
        waiting = asyncio.create_task(pool.generate([1], **ASK))
        late = asyncio.create_task(pool.generate([1], **ASK))
        good = asyncio.create_task(pool.generate([1], **ASK))
        await settle()
        client.reply(versions=[1, 2])
        await settle()
        pool.set_state("a", "quarantined")
        with pytest.raises(EngineError, match=r"versions \[2\] were withdrawn") as caught:
            await waiting
        assert caught.value.kind == "quarantined"
        pool.set_state("a", "serving", 3)
        client.reply(versions=[2])
        with pytest.raises(EngineError, match=r"versions \[2\] were withdrawn"):
            await late
        client.reply(versions=[1, 1])
        assert (await good).versions == [1, 1]

    run(main())


def test_a_version_that_is_never_proven_ends_in_a_deadline():
    async def main():
        client = Manual("a")
        pool = await pool_of(client, wait=0.2)
        task = asyncio.create_task(pool.generate([1], **ASK))
        await settle()
        client.reply(versions=[2])
        with pytest.raises(EngineError, match=r"a: versions \[2\] were not proven within 0.2 s"):
            await task

    run(main())


def test_busy_intervals_cover_the_time_with_a_request_in_flight_and_are_handed_out_once():
    async def main():
        client = Manual("a")
        pool = await pool_of(client)
        begin = time.time()
        tasks = [asyncio.create_task(pool.generate([1], **ASK)) for _ in range(2)]
        await settle()
        await asyncio.sleep(0.05)
        client.reply()
        await settle()
        (open_interval,) = pool.take_busy()["a"]
        assert open_interval[0] >= begin and open_interval[1] - open_interval[0] >= 0.04
        client.reply()
        await asyncio.gather(*tasks)
        (rest,) = pool.take_busy()["a"]
        assert rest[0] == open_interval[1]  # nothing counted twice, nothing lost
        assert pool.take_busy()["a"] == []

    run(main())


def test_an_announcement_adds_an_engine_and_a_bad_one_says_why():
    with ScriptedEngine(version="4") as engine:

        async def main():
            pool = EnginePool(TOKEN)
            await pool.update("engine-0", {"url": engine.url, "state": "serving", "version": 4})
            reply = await pool.generate([8], **ASK)
            with pytest.raises(ValueError, match="state 'fast'; expected one of serving, held, quarantined, none"):
                await pool.update("engine-0", {"url": engine.url, "state": "fast", "version": 4})
            with pytest.raises(ValueError, match="serving needs the version"):
                await pool.update("engine-0", {"url": engine.url, "state": "serving", "version": None})
            with pytest.raises(ValueError, match="url"):
                await pool.update("engine-1", {"state": "none"})
            with pytest.raises(ValueError, match="state 'fast'"):  # nor does a bad one move or add an engine
                await pool.update("engine-0", {"url": "http://127.0.0.1:9", "state": "fast", "version": 4})
            with pytest.raises(ValueError, match="serving needs the version"):
                await pool.update("engine-1", {"url": engine.url, "state": "serving", "version": None})
            assert list(pool.engines) == ["engine-0"]
            assert (await pool.generate([8], **ASK)).versions == [4, 4, 4, 4]
            await pool.close()
            return reply

        assert run(main()).versions == [4, 4, 4, 4]
