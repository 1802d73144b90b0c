"""The private folder of a server, and the removal of folders that killed servers have left."""

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
YOUNGEST = 60.0  # a folder younger than these seconds may not be locked yet


class PrivateFolder:
    """A new folder of mode 0700 for data that the models' processes share and that must not outlive the server.

    It stays locked until `close` removes it. A server that was killed leaves its folder, which the next server of the
    same user removes if its lock is free. Raises OSError if the folder cannot be made.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._lock.acquire()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders that killed servers of this user have left. Folders of other users are left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime < YOUNGEST or folder.is_symlink() or not folder.is_dir():
                continue
            if folder.stat().st_uid != os.getuid():
                continue
            with FileLock(folder / LOCK, timeout=0, thread_local=False):
                pass
            shutil.rmtree(folder, ignore_errors=True)
