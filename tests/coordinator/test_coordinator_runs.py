"""Whole runs over HTTP with fake workers and a fake trainer: nothing waits for ever, nothing finished is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from coordinator_fakes import prompts, prompts_of, receipt, recipe

from megatron_agentrl.coordinator.app import CoordinatorApp
from megatron_agentrl.coordinator.batch_plan import Plan
from megatron_agentrl.coordinator.ledger import Ledger
from megatron_agentrl.coordinator.service import Coordinator
from megatron_agentrl.data.stream import Stream

TOKEN = "secret"


class Run:
    """A served coordinator and clients of it. `outcome(prompt, sample)` is what a fake agent makes of a sample: a
    status (with reward for ok), or None to never answer."""

    def __init__(self, folder: Path, made, sets, grace: float = 15.0) -> None:
        stream = Stream(len(sets.train), made.seed, made.data.shuffle, made.data.epochs)
        self.coordinator = Coordinator(made, Ledger(folder / "ledger.sqlite", stream), sets, grace=grace)
        self.fatal: list[str] = []
        self.app = CoordinatorApp(self.coordinator, TOKEN, folder, self.fatal.append)
        self.outcome = lambda prompt, sample: "ok"
        self.version = 0

    async def __aenter__(self) -> Run:
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app.asgi),
            base_url="http://coordinator",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=30,
        )
        self.tasks = [asyncio.create_task(self.app._watch_leases())]
        await self.publish(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.http.aclose()
        self.coordinator.ledger.balance()
        self.coordinator.ledger.close()
        assert not self.fatal

    async def post(self, path: str, body) -> dict:
        reply = await self.http.post(path, content=msgspec.json.encode(body))
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def publish(self, version: int) -> None:
        await self.post("/versions", {"engine": "engine-0", "version": version, "state": "proven"})
        self.version = version

    def work_for_ever(self, room: int = 8) -> None:
        self.tasks.append(asyncio.create_task(self._work(room)))

    async def _work(self, room: int) -> None:
        running: set[asyncio.Task] = set()
        while True:
            reply = await self.post("/work", {"worker": "worker-0", "max": max(1, room - len(running))})
            for group in reply["groups"]:
                for sample in group["samples"]:
                    task = asyncio.create_task(self._sample(group, sample))
                    running.add(task)
                    task.add_done_callback(running.discard)
            if reply["stop"]:
                return

    async def _sample(self, group: dict, sample: int) -> None:
        await asyncio.sleep(0.01)
        status = self.outcome(group["task"]["answer"], sample)
        if status is None:
            return
        message = "" if status == "ok" else "context too long"
        made = receipt(group["task_id"], sample, {self.version: 4}, status=status, message=message)
        await self.post("/receipts", [made])

    async def step(self, step: int) -> tuple[str, list[int] | str]:
        """Waits for the batch of `step`, trains it and publishes the next version."""
        while True:
            reply = (await self.http.get("/batch", params={"step": step, "wait": 2})).json()
            if reply["status"] == "waiting":
                continue
            if reply["status"] != "ready":
                return reply["status"], reply["message"]
            plan = msgspec.convert(reply["plan"], Plan, strict=False)
            await self.post("/steps", {"step": step, "metrics": {"loss": 0.5}})
            await self.publish(step + 1)
            return "ready", prompts_of(plan)

    async def steps(self, count: int) -> list[tuple[str, list[int] | str]]:
        return [await self.step(step) for step in range(count)]


def serve(coroutine_of, *arguments, limit: float = 10.0, **options):
    """Runs `coroutine_of(run)` against a served coordinator within `limit` seconds."""

    async def main():
        async with Run(*arguments, **options) as run:
            return await asyncio.wait_for(coroutine_of(run), limit)

    return asyncio.run(main())


def test_a_prompt_that_always_fails_is_given_up_once_and_replaced(tmp_path):
    asked = []

    async def run(run: Run):
        run.outcome = lambda prompt, sample: (
            asked.append((prompt, sample)) or ("engine_error" if prompt == "p1" else "ok")
        )
        run.work_for_ever()
        return await run.steps(2), run.coordinator.ledger.counts()

    trained, counts = serve(run, tmp_path, recipe(batch=2, group_size=2, eta=1), prompts(6))
    assert trained == [("ready", [0, 2]), ("ready", [3, 4])]
    assert counts.failed == 1
    assert asked.count(("p1", 0)) == 3  # once and two retries
    assert counts.admitted == counts.trained + counts.failed + counts.buffered + counts.running


def test_every_prompt_failing_ends_the_run_with_the_engines_message(tmp_path):
    async def run(run: Run):
        run.outcome = lambda prompt, sample: "engine_error"
        run.work_for_ever()
        return await run.step(0)

    status, message = serve(run, tmp_path, recipe(), prompts(6))
    assert status == "failed"
    assert "the last 8 groups all failed" in message
    assert "engine_error: context too long" in message


def test_an_evaluation_ends_although_training_has_failed(tmp_path):
    async def run(run: Run):
        run.outcome = lambda prompt, sample: "ok" if prompt.startswith("h") else "engine_error"
        run.work_for_ever()
        assert (await run.step(0))[0] == "failed"
        eval_id = (await run.post("/evals", {"tag": "during", "version": 0}))["eval_id"]
        while not (status := (await run.http.get(f"/evals/{eval_id}", params={"wait": 1})).json())["done"]:
            pass
        return status

    status = serve(run, tmp_path, recipe(), prompts(6, held_out=2))
    assert (status["finished"], status["size"]) == (2, 2)


def test_a_stream_in_which_everything_failed_is_a_failure_not_an_end(tmp_path):
    async def run(run: Run):
        run.outcome = lambda prompt, sample: "engine_error"
        run.work_for_ever()
        return await run.step(0)

    status, message = serve(run, tmp_path, recipe(epochs=1), prompts(3))
    assert status == "failed"
    assert "context too long" in message


def test_an_exhausted_stream_ends_after_the_last_full_batch(tmp_path):
    async def run(run: Run):
        run.work_for_ever()
        return await run.steps(3), run.coordinator.ledger.counts()

    trained, counts = serve(run, tmp_path, recipe(epochs=1), prompts(5))
    assert trained[:2] == [("ready", [0, 1]), ("ready", [2, 3])]
    assert trained[2] == ("exhausted", "the stream's 5 prompts are used up, 1 groups are left")
    assert (counts.trained, counts.buffered, counts.untouched) == (4, 1, 0)


def test_a_second_epoch_goes_on_where_it_is_allowed(tmp_path):
    async def run(run: Run):
        run.work_for_ever()
        return await run.steps(3)

    trained = serve(run, tmp_path, recipe(), prompts(5))
    assert trained == [("ready", [0, 1]), ("ready", [2, 3]), ("ready", [4, 5])]


def test_a_sample_that_never_answers_frees_its_slot(tmp_path):
    made = recipe(batch=2, group_size=3, eta=0)
    made.agent.timeout, made.agent.retries = 0.05, 1

    async def run(run: Run):
        run.outcome = lambda prompt, sample: None if (prompt, sample) == ("p0", 2) else "ok"
        run.work_for_ever()
        trained = await run.step(0)
        return trained, len(run.coordinator.ledger.counters), run.coordinator.ledger.counters["failed_timeout"]

    trained, _, timeouts = serve(run, tmp_path, made, prompts(6), grace=0.05)
    assert trained == ("ready", [0, 1])  # scored on the two that survived
    assert timeouts == 2


def test_one_survivor_is_too_few(tmp_path):
    made = recipe(batch=1, group_size=2, eta=0)
    made.agent.retries = 0

    async def run(run: Run):
        run.outcome = lambda prompt, sample: "timeout" if (prompt, sample) == ("p0", 1) else "ok"
        run.work_for_ever()
        return await run.step(0), run.coordinator.ledger.counts(), run.coordinator.ledger.counters

    trained, counts, counters = serve(run, tmp_path, made, prompts(6))
    assert trained == ("ready", [1])
    assert (counts.dropped, counters["dropped_too_few_survivors"]) == (1, 1)


def test_200_weight_updates_with_a_full_queue_do_not_deadlock(tmp_path):
    async def run(run: Run):
        run.work_for_ever()
        return await run.steps(200)

    trained = serve(run, tmp_path, recipe(batch=1, group_size=1, eta=1), prompts(6), limit=30)
    assert [prompts_of_step for _, prompts_of_step in trained] == [[step] for step in range(200)]


def test_nothing_waits_without_saying_for_whom(tmp_path):
    async def run(run: Run):
        empty = (await run.http.get("/batch", params={"step": 0})).json()
        await run.post("/work", {"worker": "worker-0", "max": 3})
        return empty, (await run.http.get("/batch", params={"step": 0, "wait": 0.01})).json()

    empty, asked = serve(run, tmp_path, recipe(batch=16, group_size=2), prompts(99))
    assert empty == {
        "status": "waiting",
        "late": "waiting for 16 of 16 groups: no group is in flight, no worker has asked for work; "
        "engine-0 proven version 0",
    }
    assert asked["late"] == (
        "waiting for 16 of 16 groups: oldest t000000 asked 0 s ago of worker-0, 2 samples open; "
        "engine-0 proven version 0"
    )


def test_an_eval_goes_before_training_and_failures_are_not_zeros(tmp_path):
    made = recipe(batch=2, group_size=2)
    made.eval.temperature = 0.0
    made.agent.retries = 0

    async def run(run: Run):
        eval_id = (await run.post("/evals", {"tag": "before", "version": 0}))["eval_id"]
        assert (await run.post("/evals", {"tag": "before", "version": 0}))["eval_id"] == eval_id
        work = (await run.post("/work", {"worker": "worker-0", "max": 5}))["groups"]
        ids = [group["task_id"] for group in work]
        pending = (await run.http.get(f"/evals/{eval_id}")).json()
        answers = [
            receipt(ids[0], 0, {0: 3}, reward=1.0, turns=2.0),
            receipt(ids[1], 0, {0: 5}, reward=0.0, turns=4.0),
            receipt(ids[2], 0, {0: 5}, reward=0.25),
            receipt(ids[3], 0, status="timeout", message="no answer"),
        ]
        await run.post("/receipts", answers)
        done = (await run.http.get(f"/evals/{eval_id}", params={"wait": 5})).json()
        return [(group["kind"], group["temperature"]) for group in work], pending, done, run.coordinator.ledger.counts()

    kinds, pending, done, counts = serve(run, tmp_path, made, prompts(9, held_out=4))
    assert kinds == [("eval", 0.0)] * 4 + [("train", 1.0)]
    assert (pending["done"], pending["finished"], pending["size"]) == (False, 0, 4)
    assert pending["success"] is None
    assert "waiting for 4 of 4 evaluations: oldest e0001-000000 asked 0 s ago of worker-0" in pending["late"]
    assert done == {
        "done": True,
        "size": 4,
        "finished": 3,
        "failed": 1,
        "success": pytest.approx(1 / 3),
        "metrics": {"reward": pytest.approx(1.25 / 3), "turns": 3.0},
        "tokens": 13,
        "message": "1 of 4 failed and are not in the means; first: timeout: no answer",
    }
    assert (counts.admitted, counts.running) == (1, 1)  # evals are not in the training balance


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("POST", "/work", {"worker": "w"}, 400, "max"),
        ("POST", "/receipts", [{"task_id": "t000000"}], 400, "rollout_id"),
        ("POST", "/versions", {"engine": "e", "version": 0, "state": "great"}, 400, "great"),
        ("GET", "/batch?step=7", None, 409, "step 7 has no plan and the next one to be planned is 0"),
        ("GET", "/batch", None, 400, "step is missing"),
        ("GET", "/batch?step=0&wait=nan", None, 400, "wait='nan' is not a number"),
        ("GET", "/evals/e9", None, 404, "there is no eval e9"),
        ("POST", "/evals", {"tag": "before", "version": 0}, 409, "no held-out prompts"),
        ("POST", "/checkpoints", {"step": 0, "folder": "nowhere"}, 409, "nowhere is not a folder"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(tmp_path, method, path, body, status, error):
    async def run(run: Run):
        reply = await run.http.request(method, path, content=msgspec.json.encode(body))
        return reply.status_code, reply.json()["error"]

    found, message = serve(run, tmp_path, recipe(), prompts(3))
    assert found == status
    assert error in message


def test_the_runs_token_is_needed_except_for_health(tmp_path):
    async def run(run: Run):
        wrong = {"Authorization": "Bearer guess"}
        codes = [(await run.http.get(path, headers=wrong)).status_code for path in ("/status", "/batch", "/health")]
        return codes, (await run.http.get("/status")).json()

    codes, status = serve(run, tmp_path, recipe(batch=2, eta=1), prompts(3))
    assert codes == [401, 401, 200]
    assert (status["slots"], status["engines"]) == (4, {"engine-0": 0})


def test_workers_are_told_to_stop_when_the_trainer_is_done(tmp_path):
    async def run(run: Run):
        await run.post("/progress", {"phase": "done", "step": 3, "of": 3})
        return await run.post("/work", {"worker": "worker-0", "max": 4})

    assert serve(run, tmp_path, recipe(), prompts(3)) == {"groups": [], "stop": True}


def test_a_broken_account_stops_the_process_and_every_later_answer(tmp_path):
    async def run(run: Run):
        first = await run.http.post("/steps", content=b'{"step": 5}')
        second = await run.http.get("/status")
        fatal = run.fatal.copy()
        run.fatal.clear()
        return first.status_code, second.status_code, fatal

    first, second, fatal = serve(run, tmp_path, recipe(), prompts(3))
    assert (first, second) == (500, 503)
    assert "step 5 was reported trained; 0 is the next to be trained" in fatal[0]
