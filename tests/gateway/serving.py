"""A gateway on a real socket in this process, with an engine that says what a script tells it."""

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp
import uvicorn
from toys import EngineSays

from megatron_agentrl.chat.sampling import SamplingContract
from megatron_agentrl.gateway.app import Gateway
from megatron_agentrl.trajectory.spool import SpoolWriter

TOKEN = "the-run-token"


class ScriptedEngine:
    """Answers each request with `say(prompt_ids, n)` (n counts requests); remembers what it was asked."""

    def __init__(self, say: Callable, delay: float = 0.0) -> None:
        self.say, self.delay = say, delay
        self.asked: list[dict] = []
        self.cancelled = 0

    async def generate(self, token_ids, *, max_tokens, temperature, stop_token_ids):
        asked = {
            "ids": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": list(stop_token_ids),
        }
        self.asked.append(asked)
        number = len(self.asked) - 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = self.say(asked["ids"], number)
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, EngineSays) else EngineSays(said)


class Client:
    """The run's side of a gateway: opens and finishes sessions."""

    def __init__(self, gateway: Gateway, url: str, http: aiohttp.ClientSession) -> None:
        self.gateway, self.url, self.http = gateway, url, http

    async def call(self, method, url, key=TOKEN, body=None, headers=None):
        headers = {"Authorization": f"Bearer {key}", **(headers or {})}
        async with self.http.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def open(self, **body):
        status, opened = await self.call("POST", self.url + "/sessions", body={"task_id": "task", "sample": 0, **body})
        assert status == 200, opened
        return opened

    async def finish(self, opened, key=None, **body):
        body = {"status": "ok", "reward": 1.0, **body}
        return await self.call("POST", opened["session_url"] + "/finish", key or opened["control_key"], body)

    async def chat(self, opened, body, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.call(
            "POST", opened["openai_base_url"] + "/chat/completions", opened["api_key"], body, headers
        )

    async def stats(self):
        return (await self.call("GET", self.url + "/stats"))[1]


@contextlib.asynccontextmanager
async def serving(policy, engine, run_dir, **more):
    contract = SamplingContract(1.0, 14, 56, 128)
    spool = SpoolWriter(run_dir, "gateway-0")
    gateway = Gateway(policy, contract, engine, spool.append, TOKEN, "http://replaced", **more)
    server = uvicorn.Server(uvicorn.Config(gateway.asgi, port=0, log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    gateway._url = url
    async with aiohttp.ClientSession() as http:
        yield Client(gateway, url, http)
    server.should_exit = True
    await task
    spool.close()
