"""Damage to files, and disks that fail."""

import contextlib
import io
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rest_local import paths


def overwrite(file: Path, data: bytes) -> None:
    """Write over the first bytes of a file in place, in 3 us.

    A file that is truncated first, as `write_bytes` does, is flushed to the disk when it is closed: 2 ms on ext4.
    """
    with file.open("r+b") as opened:
        opened.write(data)


def write_with(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Callable[[Any], int], Any], int]) -> None:
    """Let every write of a file that `paths.replacing` makes become `hook(write, data)`."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            return hook(super().write, data)

    def opened(path: Path, mode: str, opener: Any) -> io.BufferedWriter:
        return io.BufferedWriter(Raw(path, mode, opener=opener))

    monkeypatch.setattr(paths, "open", opened, raising=False)


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Limit the size of this process's files: a write beyond it fails with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """Mount a real file system of so many bytes in a new folder, or skip the test if that is not allowed."""
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
