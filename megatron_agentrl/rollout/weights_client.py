"""An engine process as the publisher sees it: staging, pause, install, canary over vLLM's HTTP routes.

`VllmEngine` implements `weights.engine.Engine` (blocking). Generation is `rollout.client`, kept apart because the
gateway needs no torch. Policy versions are integers; on vLLM's side they are their decimal text, or `none`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from megatron_agentrl.rollout.client import NO_VERSION, decode, excerpt
from megatron_agentrl.weights.engine import EngineError, Staging
from megatron_agentrl.weights.manifest import Manifest
from megatron_agentrl.weights.staging import BeginStaging
from megatron_agentrl.weights.transport import Rendezvous


class VllmEngine:
    """An engine replica as the publisher sees it (implements `weights.engine.Engine`). Threads may share it."""

    def __init__(self, name: str, url: str, token: str, workers: int = 1) -> None:
        self.name = name
        self.workers = workers
        self._manifest: Manifest | None = None
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def wait_ready(self, deadline: float, alive: Any = None) -> None:
        """Returns when the server answers `/health`. `alive()`, if given, says whether the process still runs."""
        while True:
            if alive is not None and not alive():
                raise EngineError(self.name, "unreachable", "the engine process ended while starting; see its log")
            try:
                status = self._http.get("/health", timeout=2).status_code
                if status == 200:
                    return
                found = f"/health answers {status}"
            except httpx.TransportError as error:  # not listening yet
                found = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise EngineError(self.name, "late", f"the server did not come up in time ({found}); see its log")
            time.sleep(0.1)

    def begin_staging(
        self, version: int, manifest: Manifest, rendezvous: Rendezvous | None, seconds: float, deadline: float
    ) -> None:
        known = rendezvous is None and manifest == self._manifest
        request = BeginStaging(version, seconds, None if known else manifest, rendezvous)
        self._call_workers("stage_begin", deadline, msgspec.json.encode(request).decode())
        self._manifest = manifest

    def staging(self, deadline: float) -> list[Staging]:
        answer = self._call_workers("stage_status", deadline)
        try:
            return msgspec.convert(answer, list[Staging])
        except msgspec.ValidationError as error:
            raise EngineError(self.name, "protocol", f"unreadable staging status ({error}): {answer}") from error

    def pause(self, clear_cache: bool, deadline: float) -> None:
        self._post("/pause", deadline, params={"mode": "keep", "clear_cache": str(clear_cache).lower()})

    def install(self, version: int, deadline: float) -> None:
        self._post("/update_weight_version", deadline, json={"new_version": NO_VERSION})
        self._post("/start_weight_update", deadline)
        self._post("/update_weights", deadline, json={"update_info": {"version": version}})
        self._post("/finish_weight_update", deadline, json={"weight_version": str(version)})

    def resume(self, deadline: float) -> None:
        self._post("/resume", deadline)

    def withdraw(self, deadline: float) -> None:
        self._post("/update_weight_version", deadline, json={"new_version": NO_VERSION})
        self._post("/abort_requests", deadline, json={})

    def name_version(self, version: int, deadline: float) -> None:
        """Gives the present weights their version. For an engine that loaded a model folder itself: it starts without."""
        self._post("/update_weight_version", deadline, json={"new_version": str(version)})

    def version(self, deadline: float) -> int | None:
        """The version the engine stamps on tokens now."""
        name = self._field(self._request("GET", "/weight_info", deadline), "weight_version")
        return int(name) if name.isdecimal() else None

    def score(self, token_ids: Sequence[int], deadline: float) -> list[float]:
        # Prompt logprobs are taken before any sampling processor and never read from the prefix cache.
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        entries = decode(self.name, self._post("/inference/v1/generate", deadline, json=body).content).prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            found = None if entries is None else len(entries)
            raise EngineError(self.name, "protocol", f"{found} prompt logprobs for {len(token_ids)} tokens")
        try:
            return [float(entry[token]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]  # type: ignore[index]
        except (KeyError, TypeError) as error:
            raise EngineError(self.name, "protocol", f"prompt logprobs lack the prompt's own token: {error}") from error

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    def _call_workers(self, method: str, deadline: float, *args: str) -> list[Any]:
        body = {"method": method, "args": list(args)}
        return self._field(self._post("/collective_rpc", deadline, json=body), "results")

    def _field(self, response: httpx.Response, name: str) -> Any:
        try:
            return response.json()[name]
        except (ValueError, KeyError, TypeError) as error:
            message = f"{response.url.path}: no {name!r} in the reply: {excerpt(response.content)}"
            raise EngineError(self.name, "protocol", message) from error

    def _post(self, path: str, deadline: float, **kwargs: Any) -> httpx.Response:
        return self._request("POST", path, deadline, **kwargs)

    def _request(self, method: str, path: str, deadline: float, **kwargs: Any) -> httpx.Response:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise EngineError(self.name, "late", f"no time left for {path}")
        try:
            response = self._http.request(method, path, timeout=seconds, **kwargs)
        except httpx.TimeoutException as error:
            raise EngineError(self.name, "late", f"{path} took more than {seconds:.1f} s") from error
        except httpx.TransportError as error:
            raise EngineError(self.name, "unreachable", f"{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(
                self.name, "refused", f"{path}: status {response.status_code}: {excerpt(response.content)}"
            )
        return response
