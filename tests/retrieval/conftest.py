"""Makes `oracle` importable, because test directories are not packages."""

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hard links fail, as on exFAT and on many network and FUSE file systems."""

    def refused(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Apply permissions to this thread as to a normal user: root drops its capabilities for the test."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root ignores permissions, and only Linux lets it give that up")
    with _without_capabilities():
        yield


@contextlib.contextmanager
def _without_capabilities() -> Iterator[None]:
    """Clear the effective capabilities of this thread (capabilities(7)), and restore them from the permitted ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: twice 32 bits each
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    none = (ctypes.c_uint32 * 6)(*held)
    none[0] = none[3] = 0
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        if libc.capset(header, held):
            raise OSError(ctypes.get_errno(), "capset")
