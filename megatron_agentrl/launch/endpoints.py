"""Where the processes of one start of a run listen, and the token that lets them talk to one another.

Written by the supervisor before it starts anything; every process reads it from the run folder. The file holds a
secret, so only its owner may read it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "endpoints.json"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Below, services have their well-known ports.
_FIRST = 10000
#: Ports that are tried before the system is asked for any.
_TRIES = 100


@dataclass(frozen=True)
class Endpoints:
    """Addresses of one start. URLs have no trailing slash; lists are indexed by engine replica."""

    token: str
    coordinator: str
    gateway: str
    engines: list[str]
    trainer_master: str
    """`host:port` of the trainer ranks' rendezvous (torch.distributed)."""
    transfer: list[str]
    """`host:port` of the rendezvous of the process group that moves weights to each engine."""

    def write(self, run_dir: str | Path) -> Path:
        """Replaces the file in one step; it is never readable by others, not even while it is written."""
        path = Path(run_dir) / FILE_NAME
        partial = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return path

    @classmethod
    def read(cls, run_dir: str | Path) -> Endpoints:
        return cls(**json.loads((Path(run_dir) / FILE_NAME).read_text(encoding="utf-8")))


def port_of(url: str) -> int:
    """Port of an endpoint's URL."""
    return int(url.rpartition(":")[2])


def host_of(url: str) -> str:
    """Host of an endpoint's URL."""
    return url.rpartition(":")[0].partition("//")[2]


def choose(host: str, replicas: int, coordinator: int = 0, gateway: int = 0, engine: int = 0) -> Endpoints:
    """Endpoints for one start: the ports that are given, and free ones, all different, where a port is 0.

    Raises OSError, naming the port, when a given one is taken.
    """
    engines = [engine + i if engine else 0 for i in range(replicas)]
    wanted = [coordinator, gateway, *engines, *[0] * (1 + replicas)]
    with ExitStack() as held:  # all are held until all are known, so no port is chosen twice
        bound = [held.enter_context(bind(host, port)) if port else None for port in wanted]
        ports = [(each or held.enter_context(_bind_free(host))).getsockname()[1] for each in bound]
    urls = [f"http://{host}:{port}" for port in ports[: 2 + replicas]]
    return Endpoints(
        token=secrets.token_urlsafe(32),
        coordinator=urls[0],
        gateway=urls[1],
        engines=urls[2:],
        trainer_master=f"{host}:{ports[2 + replicas]}",
        transfer=[f"{host}:{port}" for port in ports[3 + replicas :]],
    )


def free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now and that the system gives to nobody by itself, all different."""
    with ExitStack() as held:
        return [held.enter_context(_bind_free(host)).getsockname()[1] for _ in range(count)]


def _bind_free(host: str) -> socket.socket:
    """A socket on a free port outside of the range from which the system takes the ports of outgoing connections.

    Its owner may come up many seconds after the port was chosen: a port of that range could be anybody's by then.
    """
    outside = _outside(*_given_by_the_system())
    for _ in range(_TRIES if outside else 0):
        # Without SO_REUSEADDR: two sockets that have it may both be bound to a port on which nobody listens yet.
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind((host, secrets.choice(outside)))
        except OSError:  # taken, or lately in use: another one
            bound.close()
            continue
        return bound
    return bind(host, 0)


def _outside(low: int, high: int) -> range:
    """The larger part of the unprivileged ports that lies below or above [low, high]."""
    return max(range(_FIRST, low), range(high + 1, 65536), key=len)


def _given_by_the_system() -> tuple[int, int]:
    if not _RANGE.is_file():
        return 32768, 60999  # Linux's own default
    low, high = map(int, _RANGE.read_text().split())
    return low, high


def bind(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: any free one). SO_REUSEADDR as servers do, so a port in TIME_WAIT counts as free."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"port {port} on {host}: {error.strerror}") from error
    return bound
