"""The private folder of a server: for what its models' processes share, and must not outlive it.

A server that was killed leaves its folder. The next server of the same user removes it: a folder whose lock is free
belongs to none that runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "rest-local-server-"
LOCK = "lock"
YOUNGEST = 60.0  # seconds: a younger folder may not be locked yet


class PrivateFolder:
    """A new folder of mode 0700, locked until `close` removes it. Raises OSError if it cannot be made."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._lock.acquire()

    def close(self) -> None:
        """Remove it. Idempotent."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders that killed servers of this user have left. Folders of other users are left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime < YOUNGEST or not _is_own(folder):
                continue
            lock = FileLock(folder / LOCK, thread_local=False)
            lock.acquire(timeout=0)
            lock.release()
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's, and no link."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
