"""The trainer's client of the coordinator: what is late or odd is an error that says who and what."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_agentrl.trainer.coordinator_client import CoordinatorClient, CoordinatorError


@contextmanager
def coordinator(**answers):
    """A server that gives each path its fixed answer (bytes, or what becomes JSON)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers[self.path.split("?")[0].strip("/").split("/")[0]]
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield CoordinatorClient(f"http://127.0.0.1:{server.server_address[1]}", "token")
    finally:
        server.shutdown()
        server.server_close()


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    """Compute nodes often name one for the outside; it knows nothing of a run's own addresses."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with coordinator(batch={"status": "ready", "plan": {"step": 3}}) as client:
        assert client.batch(3, deadline=5.0) == {"step": 3}


def test_a_late_batch_or_evaluation_says_for_whom_the_coordinator_waits():
    late = "waiting for 2 of 8 evaluations; worker-1 has been silent for 40 s"
    with coordinator(
        batch={"status": "waiting", "late": late}, evals={"eval_id": "e", "done": False, "late": late}
    ) as client:
        with pytest.raises(CoordinatorError, match="no batch for step 4 after 0 s: waiting for 2 of 8.*worker-1"):
            client.batch(4, deadline=0.2)
        with pytest.raises(CoordinatorError, match="'after' not finished after 0 s: waiting for 2 of 8.*worker-1"):
            client.evaluate("after", 4, deadline=0.2)


def test_a_failed_run_and_an_exhausted_stream_are_told_apart():
    failed = pytest.raises(CoordinatorError, match="no batch for step 1: engine-0 died")
    with coordinator(batch={"status": "failed", "message": "engine-0 died"}) as client, failed:
        client.batch(1, deadline=5.0)
    with coordinator(batch={"status": "exhausted", "message": "no prompts"}) as client:
        assert client.batch(1, deadline=5.0) is None


def test_a_reply_that_is_no_json_is_quoted():
    refused = pytest.raises(CoordinatorError, match="no JSON: <html>gateway timeout")
    with coordinator(steps=b"<html>gateway timeout") as client, refused:
        client.step_done(1, {})
