"""Find the directories of rest-local: a cache that may be deleted at any time, the user's data, and the configuration.

Directories are made on first use, readable by the user only (0700).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import platformdirs

_UNFINISHED = re.compile(r"\.rest-local-new-[0-9a-f]{16}\Z")


def cache_dir() -> Path:
    """Make and return the cache, `$REST_LOCAL_CACHE` or the platform's. Measuring fills it again. Raises OSError."""
    setting = os.environ.get("REST_LOCAL_CACHE") or platformdirs.user_cache_dir("rest-local", appauthor=False)
    return _made(Path(setting).expanduser())


def data_dir() -> Path:
    """Make and return the directory of the user's data, `data_home`. Raises OSError if it cannot be made."""
    return _made(data_home())


def data_home() -> Path:
    """Return `$REST_LOCAL_DATA`, or the platform's user data directory, without making it."""
    setting = os.environ.get("REST_LOCAL_DATA") or platformdirs.user_data_dir("rest-local", appauthor=False)
    return Path(setting).expanduser()


def datastores_home() -> Path:
    """Return the directory of named datastores: `$REST_LOCAL_DATASTORES`, or `datastores` in `data_dir`."""
    setting = os.environ.get("REST_LOCAL_DATASTORES")
    return Path(setting) if setting else data_dir() / "datastores"


def config_file() -> Path:
    """Return `$REST_LOCAL_CONFIG`, or `config.toml` in the platform's directory. The file need not exist."""
    setting = os.environ.get("REST_LOCAL_CONFIG")
    if setting:
        return Path(setting).expanduser()
    return Path(platformdirs.user_config_dir("rest-local", appauthor=False)) / "config.toml"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` when the block ends.

    A reader sees the old or the new content, never a part. After an error `path` is unchanged, and the new file is
    gone. Raises OSError.

    The new file (its path is `name`) lies in the folder of `path` with mode 0600, and is locked while it is written. So
    files of killed processes can be told from those of living ones: the first write of a process into a folder deletes
    them (`delete_unfinished`). With `durable`, content and name are synced. Without it the file may be gone or empty
    after a power cut, which a cache can bear.
    """
    _clean_once(path.parent)
    file = _new_file(path.parent)
    try:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except BaseException:
        try:
            with contextlib.suppress(OSError):  # closing flushes the buffer, which may fail again
                file.close()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
        raise
    file.close()
    if durable:
        _sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace the content of `path` as `replacing` does."""
    with replacing(path, durable=durable) as file:
        file.write(content)


def delete_unfinished(folder: Path) -> None:
    """Delete files that killed processes left half-written in a folder. A locked one is in use and stays."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.path for entry in entries if _UNFINISHED.match(entry.name)]
    except OSError:
        return
    for name in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _locked(descriptor):
                    os.unlink(name)
            finally:
                os.close(descriptor)


_clean_once = functools.lru_cache(maxsize=256)(delete_unfinished)


def _new_file(folder: Path) -> BinaryIO:
    """Create a locked file. If another process deletes it as a leftover before it is locked, create another."""
    while True:
        file = open(folder / f".rest-local-new-{secrets.token_hex(8)}", "xb", opener=_private)  # noqa: SIM115
        try:
            is_ours = _locked(file.fileno())
        except OSError:  # Without locks in this file system, nobody deletes the file either.
            is_ours = True
        with contextlib.suppress(FileNotFoundError):
            if is_ours and os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
                return file
        file.close()


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _locked(descriptor: int) -> bool:
    """Try to lock an open file. Return False if another process holds the lock."""
    from filelock import lock_descriptor

    return lock_descriptor(descriptor, blocking=False)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable if the file system can sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
