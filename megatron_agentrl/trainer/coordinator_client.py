"""The coordinator as trainer rank 0 sees it: batches, steps, versions, evaluations, checkpoints over HTTP.

Every call has a deadline; a coordinator that does not answer, or a batch that does not come, is an error
that names the late party. No state is kept here.
"""

from __future__ import annotations

import time
from typing import Any

import httpx


class CoordinatorError(RuntimeError):
    """The coordinator refused, failed or was late."""


class CoordinatorClient:
    def __init__(self, url: str, token: str, call_timeout: float = 30.0):
        self._url = url
        self._http = httpx.Client(
            base_url=url, timeout=call_timeout, headers={"Authorization": f"Bearer {token}"}, trust_env=False
        )

    def _call(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise CoordinatorError(f"coordinator at {self._url} did not answer {method} {path}: {error!r}") from error
        if reply.status_code != 200:
            raise CoordinatorError(f"coordinator refused {method} {path}: {reply.status_code} {reply.text[:500]}")
        try:
            return reply.json()
        except ValueError as error:
            raise CoordinatorError(f"coordinator's reply to {method} {path} is no JSON: {reply.text[:500]}") from error

    def batch(self, version: int, deadline: float) -> dict[str, Any] | None:
        """The plan of the step that starts from `version`; None when the prompt stream is exhausted.

        Raises CoordinatorError after `deadline` seconds, saying whom the coordinator waits for.
        """
        end = time.monotonic() + deadline
        late = "no answer yet"
        while (left := end - time.monotonic()) > 0:
            reply = self._call("GET", "/batch", params={"step": version, "wait": min(5.0, left)})
            match reply["status"]:
                case "ready":
                    return reply["plan"]
                case "exhausted":
                    return None
                case "failed":
                    raise CoordinatorError(f"no batch for step {version}: {reply['message']}")
            late = reply["late"]
        raise CoordinatorError(f"no batch for step {version} after {deadline:.0f} s: {late}")

    def step_done(self, version: int, metrics: dict[str, float]) -> None:
        self._call("POST", "/steps", json={"step": version, "metrics": metrics})

    def version(self, version: int, engine: str, state: str, gap: float | None, seconds: float | None) -> None:
        self._call(
            "POST",
            "/versions",
            json={"version": version, "engine": engine, "state": state, "gap": gap, "seconds": seconds},
        )

    def evaluate(self, tag: str, version: int, deadline: float) -> dict[str, Any]:
        """Runs a held-out evaluation and waits for it: {"finished", "size", "success", "metrics", "tokens"}."""
        eval_id = self._call("POST", "/evals", json={"tag": tag, "version": version})["eval_id"]
        end = time.monotonic() + deadline
        late = "no answer yet"
        while (left := end - time.monotonic()) > 0:
            reply = self._call("GET", f"/evals/{eval_id}", params={"wait": min(5.0, left)})
            if reply["done"]:
                return reply
            late = reply["late"]
        raise CoordinatorError(f"evaluation {tag!r} not finished after {deadline:.0f} s: {late}")

    def checkpoint(self, step: int, folder: str) -> None:
        self._call("POST", "/checkpoints", json={"step": step, "folder": folder})

    def resume(self, step: int, folder: str | None) -> None:
        self._call("POST", "/resume", json={"step": step, "folder": folder})

    def progress(self, **fields: Any) -> None:
        self._call("POST", "/progress", json=fields)
