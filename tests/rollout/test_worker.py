"""The worker against a scripted coordinator and gateway: what it takes, runs and reports."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time

import openai
import pytest
from aiohttp import web

from megatron_agentrl.agent.env import EnvironmentFailure
from megatron_agentrl.agent.types import Result
from megatron_agentrl.rollout.worker import PeerLost, PeerRefused, Worker, WorkerSettings


class Peers:
    """Coordinator and gateway in one server: hands out `groups` once, collects receipts, then says stop."""

    def __init__(self, groups):
        self.groups, self.total = groups, sum(len(group["samples"]) for group in groups)
        self.asked, self.opened, self.finished, self.receipts = [], [], {}, []
        self.drop_finish = 0
        self.posts = 0

    async def work(self, request):
        body = await request.json()
        self.asked.append(body["max"])
        given, room = [], body["max"]
        while self.groups and len(self.groups[0]["samples"]) <= room:
            given.append(self.groups.pop(0))
            room -= len(given[-1]["samples"])
        if not given:
            await asyncio.sleep(0.02)
        return web.json_response({"groups": given, "stop": len(self.receipts) == self.total})

    async def sessions(self, request):
        assert request.headers["Authorization"] == "Bearer token"
        name = f"r{len(self.opened)}"
        self.opened.append(await request.json())
        url = f"http://127.0.0.1:{self.port}/sessions/{name}"
        return web.json_response(
            {
                "rollout_id": name,
                "session_url": url,
                "openai_base_url": url + "/v1",
                "api_key": "a" + name,
                "control_key": "c" + name,
            }
        )

    async def chat(self, request):
        name = request.match_info["name"]
        assert request.headers["Authorization"] == "Bearer a" + name
        said = (await request.json())["messages"][-1]["content"]
        if said == "break the engine":
            return web.json_response({"error": {"message": "engine-0 died"}}, status=502)
        message = {"role": "assistant", "content": said.upper()}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    async def finish(self, request):
        name = request.match_info["name"]
        assert request.headers["Authorization"] == "Bearer c" + name
        if self.drop_finish > 0:
            self.drop_finish -= 1
            request.transport.close()
            return web.Response()
        self.finished[name] = body = await request.json()
        opened = self.opened[int(name[1:])]
        receipt = {
            "rollout_id": name,
            "task_id": opened["task_id"],
            "sample": opened["sample"],
            "engine": "e",
            "lengths": [],
            "sampled": {},
        }
        return web.json_response(
            {**receipt, "where": None, **{k: body[k] for k in ("status", "reward", "metrics", "message")}}
        )

    async def take_receipts(self, request):
        self.posts += 1
        got = await request.json()
        self.receipts += got
        return web.json_response({"accepted": len(got)})

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.add_routes(
            [
                web.post("/work", self.work),
                web.post("/receipts", self.take_receipts),
                web.post("/sessions", self.sessions),
                web.post("/sessions/{name}/v1/chat/completions", self.chat),
                web.post("/sessions/{name}/finish", self.finish),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        yield
        await runner.cleanup()


def group(number, question, samples=2, **more):
    task = {
        "task_id": f"t{number}",
        "messages": [{"role": "user", "content": question}],
        "answer": question.upper(),
        "metadata": {"n": number},
    }
    return {
        "task_id": f"t{number}",
        "kind": "train",
        "samples": list(range(samples)),
        "temperature": 1.0,
        "task": task,
        **more,
    }


def work(peers, agent, concurrency=8, timeout=5.0, patience=2.0, **urls):
    async def inside():
        async with asyncio.timeout(20), peers.serving():
            base = f"http://127.0.0.1:{peers.port}"
            urls.setdefault("coordinator", base)
            urls.setdefault("gateway", base)
            settings = WorkerSettings(
                "worker-0",
                **urls,
                run_token="token",
                concurrency=concurrency,
                timeout=timeout,
                max_turns=4,
                patience=patience,
            )
            await Worker(settings, agent).run()

    asyncio.run(inside())
    return peers


class Asks:
    """Asks once; right when the reply is the answer."""

    running = most = 0

    async def run(self, task, chat):
        self.running += 1
        self.most = max(self.most, self.running)
        reply = await chat.openai().chat.completions.create(model=chat.model, messages=task.messages)
        await asyncio.sleep(0.01)
        self.running -= 1
        return Result(float(reply.choices[0].message.content == task.answer), {"turns": 1, "limit": chat.max_turns})


class Behaves:
    """Does what the task's text says."""

    async def run(self, task, chat):
        text = task.messages[0]["content"]
        if text == "raise":
            raise KeyError("my own bug")
        if text == "environment":
            raise EnvironmentFailure("the sandbox is gone")
        if text == "sleep":
            await asyncio.sleep(60)
        if text == "own timeout":
            raise TimeoutError("a tool of mine timed out")
        if text == "break the engine":
            await openai.AsyncOpenAI(
                base_url=chat.base_url, api_key=chat.api_key, max_retries=0
            ).chat.completions.create(model=chat.model, messages=task.messages)
        if text == "exit":
            exec("raise SystemExit(0)")  # as model-written code may
        if text == "cancelled tool":
            tool = asyncio.create_task(asyncio.sleep(60))
            tool.cancel()
            await tool
        if text == "lone surrogate":
            raise ValueError("\udc80 in a file name")
        if text == "unprintable":
            raise _Unprintable
        return {
            "text": 1.0,
            "nan": Result(float("nan")),
            "nan behind a metric": Result(float("nan"), {"reward": 1.0}),
            "metric": Result(1.0, {"m": "x"}),
            "metric name": Result(1.0, {(1, 2): 1.0}),
            "surrogate name": Result(1.0, {"\udc80": 1.0}),
            "good": Result(0.5),
        }[text]


class _Unprintable(Exception):
    def __str__(self):
        raise AttributeError("no message")


def test_every_sample_of_every_group_is_run_once_and_reported():
    agent = Asks()
    peers = work(Peers([group(n, f"q{n}") for n in range(6)]), agent, concurrency=5)
    assert sorted((r["task_id"], r["sample"]) for r in peers.receipts) == [
        (f"t{n}", s) for n in range(6) for s in range(2)
    ]
    assert {(r["status"], r["reward"]) for r in peers.receipts} == {("ok", 1.0)}
    assert peers.receipts[0]["metrics"] == {"turns": 1.0, "limit": 4.0}
    assert agent.most <= 5 and max(peers.asked) == 5 and min(peers.asked) >= 1
    assert peers.opened[0] == {"task_id": "t0", "sample": 0, "kind": "train", "sampling": {"temperature": 1.0}}


def test_receipts_travel_together():
    peers = work(Peers([group(n, "q", samples=8) for n in range(4)]), Asks(), concurrency=32)
    assert len(peers.receipts) == 32 and peers.posts <= 8


def test_an_eval_group_keeps_its_kind_and_temperature():
    peers = work(Peers([group(0, "q", samples=1, kind="eval", temperature=0.0)]), Asks())
    assert (peers.opened[0]["kind"], peers.opened[0]["sampling"]) == ("eval", {"temperature": 0.0})


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("raise", "agent_error", "KeyError: 'my own bug'"),
        ("environment", "environment_error", "EnvironmentFailure: the sandbox is gone"),
        ("sleep", "timeout", "the agent took longer than 0.2 s"),
        ("own timeout", "agent_error", "TimeoutError: a tool of mine timed out"),
        ("break the engine", "engine_error", "InternalServerError"),
        ("text", "agent_error", "the agent returned float; a Result was expected"),
        ("nan", "agent_error", "the agent's reward is nan"),
        ("nan behind a metric", "agent_error", "the agent's reward is nan"),
        ("metric name", "agent_error", "metric (1, 2) is named by a tuple"),
        ("surrogate name", "agent_error", "surrogates not allowed"),
        ("exit", "agent_error", "SystemExit: 0"),
        ("cancelled tool", "agent_error", "CancelledError"),
        ("lone surrogate", "agent_error", "ValueError: ? in a file name"),
        ("unprintable", "agent_error", "_Unprintable: (str() of it raises AttributeError)"),
        ("metric", "agent_error", "ValueError"),
    ],
)
def test_a_failure_has_a_kind_and_no_reward_and_others_go_on(text, status, message):
    peers = work(
        Peers([group(0, text, samples=1), group(1, "good", samples=1)]),
        Behaves(),
        timeout=0.2 if text == "sleep" else 5.0,
    )
    failed, good = sorted(peers.receipts, key=lambda receipt: receipt["task_id"])
    assert (failed["status"], failed["reward"]) == (status, None)
    assert message in failed["message"]
    assert (good["status"], good["reward"]) == ("ok", 0.5)


def test_a_dropped_finish_is_repeated():
    peers = Peers([group(0, "q")])
    peers.drop_finish = 2
    assert len(work(peers, Asks()).receipts) == 2


@pytest.mark.parametrize("peer", ["coordinator", "gateway"])
def test_a_lost_peer_ends_the_worker_by_name(peer):
    started = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        work(Peers([group(0, "q")]), Asks(), patience=0.5, **{peer: "http://127.0.0.1:9"})
    assert time.monotonic() - started < 10
    assert isinstance(caught.value.exceptions[0], PeerLost)
    assert f"the {peer} at http://127.0.0.1:9/" in str(caught.value.exceptions[0])


def test_a_peer_that_refuses_ends_the_worker_with_its_words():
    with pytest.raises(ExceptionGroup) as caught:
        work(_Refusing([group(0, "q")]), Asks())
    assert isinstance(caught.value.exceptions[0], PeerRefused)
    assert "the gateway answered 400" in str(caught.value.exceptions[0]) and "no such temperature" in str(
        caught.value.exceptions[0]
    )


class _Refusing(Peers):
    async def sessions(self, request):
        return web.Response(status=400, text=json.dumps({"error": {"message": "no such temperature"}}))


def test_the_module_needs_no_torch():
    code = "import sys, megatron_agentrl.rollout.worker, megatron_agentrl.gateway.app, megatron_agentrl.agent.builtin; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
