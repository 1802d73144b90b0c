"""Connects to a Ray cluster, for whatever runs there: replicas of a batch, shards of a build.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rest_local.errors import ClusterFailed, OptionError

LOCAL = "local"
CONNECT_S = 5.0
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


def check_address(address: str) -> None:
    """Raises OptionError for the address of a client outside of the cluster, which Ray would allow."""
    if address.startswith("ray://"):
        raise OptionError(f"cluster {address}: a client outside the cluster cannot stream; run it on a node with auto")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connected to the cluster, quietly; as before where the caller is connected already.

    `address`: `auto`, the cluster that this machine is a node of; host:port, the same; `local`, this machine alone.
    Raises ClusterFailed.
    """
    for name, value in (_ENVIRONMENT | (_of_this_machine() if address == LOCAL else {})).items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
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


def _of_this_machine() -> dict[str, str]:
    """Ray then gives its processes addresses of the loopback, and a token for this run alone. It would otherwise write
    one into the home directory, which changes how later programs connect to clusters."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the name is misleading
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _reach(address: str) -> None:
    """Raises ClusterFailed for a host:port that does not answer: Ray would try for many minutes."""
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


def is_rays(error: Exception) -> bool:
    """Whether an exception is of Ray or of its dataset, and not of this program."""
    with suppress(ImportError):
        from ray.exceptions import RayError

        if isinstance(error, RayError):
            return True
    return type(error).__module__.split(".")[0] == "ray"


def first_line(error: Exception) -> str:
    """Of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
