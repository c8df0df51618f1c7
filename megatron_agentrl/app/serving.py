"""How a process of the run serves HTTP: the uvicorn settings that coordinator and gateway share."""

from __future__ import annotations

from typing import Any

import uvicorn

from megatron_agentrl.launch.endpoints import host_of, port_of


def http_server(asgi: Any, url: str) -> uvicorn.Server:
    """A server for `asgi` at an endpoint's URL.

    uvicorn hands a signal on to the handler it found, once it has shut down; the default one would end the process
    before its files are closed, so the caller sets one of its own first.
    """
    config = uvicorn.Config(
        asgi,
        host=host_of(url),
        port=port_of(url),
        log_level="warning",
        access_log=False,
        # Longer than the clients keep an idle connection, so that none is closed under a request.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
