"""Use a Ray cluster, for the replicas of a batch and the tokenizing of a build: connect to it, and receive from tasks.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rest_local.errors import ClusterFailed, OptionError, printable

LOCAL = "local"
CONNECT_S = 5.0
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


def check_address(address: str) -> None:
    """Raise OptionError for the address of a client outside the cluster (`ray://`), which Ray would allow."""
    if address.startswith("ray://"):
        raise OptionError(f"cluster {address}: a client outside the cluster cannot stream; run it on a node with auto")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Stay connected to the cluster while the block runs, or use the connection that the caller has already.

    `address` is `auto` for the cluster that this machine is a node of, host:port for the same, or `local` for this
    machine alone. Raises ClusterFailed if Ray is missing or the cluster cannot be reached.
    """
    for name, value in (_ENVIRONMENT | (_local_environment() if address == LOCAL else {})).items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ClusterFailed(f"a cluster needs Ray ({error}); pip install 'rest-local[ray]'") from error

    if ray.is_initialized():
        yield
        return
    _reach(address)
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=True, **options)
    except Exception as error:
        raise ClusterFailed(f"cluster {address}: {first_line(error)}; `ray start` it, or give `local`") from error
    try:
        _restore(handlers)
        yield
    finally:
        ray.shutdown()
        _restore(handlers)


def _local_environment() -> dict[str, str]:
    """Return variables that bind Ray's processes to the loopback and give them a token for this run alone."""
    # Without the token Ray writes one into the home directory, and later programs connect to clusters with it.
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name, it makes Ray use the loopback
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _reach(address: str) -> None:
    """Raise ClusterFailed for a host:port that does not answer. Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ClusterFailed(f"cluster {address}: {error.strerror or error}; start it with `ray start`") from error


def _restore(handlers: Mapping[int, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Lost(Exception):
    """Raised if the process or the node of a task ended before the task did."""


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each node that is up."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def ready(tasks: Iterable[Any]) -> Any:
    """Wait until one of the streaming tasks has sent a message or has ended, and return it."""
    import ray

    return ray.wait(list(tasks), num_returns=1, fetch_local=False)[0][0]


def messages_of(task: Any, where: str) -> Iterator[Any]:
    """Yield the messages of a streaming task as they arrive.

    Raises Lost if its process or node ended, and ClusterFailed, which begins with `where`, for an error in the task.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        for message in task:
            yield ray.get(message)
    except RayTaskError as error:
        raise ClusterFailed(f"{where}: {printable(first_line(error))}") from error
    except RayError as error:
        raise Lost(first_line(error)) from error
