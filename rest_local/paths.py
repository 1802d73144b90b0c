"""The directories of rest-local: a cache that can be deleted at any time, and data that cannot; and the configuration.

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
    """Results that can be measured again (probes, cost curves, self-tests): `$REST_LOCAL_CACHE`, or the platform's
    user cache directory. Raises OSError where it cannot be made."""
    given = os.environ.get("REST_LOCAL_CACHE") or platformdirs.user_cache_dir("rest-local", appauthor=False)
    return _made(Path(given).expanduser())


def data_dir() -> Path:
    """The user's data: `$REST_LOCAL_DATA`, or the platform's directory. Raises OSError where it cannot be made."""
    return _made(data_home())


def data_home() -> Path:
    """The path of `data_dir`, which is not made."""
    given = os.environ.get("REST_LOCAL_DATA") or platformdirs.user_data_dir("rest-local", appauthor=False)
    return Path(given).expanduser()


def datastores_home() -> Path:
    """The directory of named datastores: `$REST_LOCAL_DATASTORES`, or `datastores` in the user's data directory."""
    given = os.environ.get("REST_LOCAL_DATASTORES")
    return Path(given) if given else data_dir() / "datastores"


def config_file() -> Path:
    """The configuration, which need not exist: `$REST_LOCAL_CONFIG`, or `config.toml` in the platform's directory."""
    given = os.environ.get("REST_LOCAL_CONFIG")
    if given:
        return Path(given).expanduser()
    return Path(platformdirs.user_config_dir("rest-local", appauthor=False)) / "config.toml"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` as a whole at the end of the block: a reader sees the old content or
    the new content, never a part. After an error `path` is as it was, and nothing else is left. Raises OSError.

    The new file (its path is `name`) lies in the folder of `path` with mode 0600, and is locked while it is written. So
    what a killed process leaves can be told from what a living one writes: the first file that a process writes in a
    folder deletes it (`delete_unfinished`). `durable`: content and name are synced. Without it the file may be gone or
    empty after a power cut, which a cache can bear.
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
            with contextlib.suppress(OSError):  # it writes what is still in memory
                file.close()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
        raise
    file.close()
    if durable:
        _sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """`replacing` with this content."""
    with replacing(path, durable=durable) as file:
        file.write(content)


def delete_unfinished(folder: Path) -> None:
    """Delete what killed processes left of files that they were writing in a folder. One that is locked is in use."""
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
    """A new file, locked. Another process may take it for one that was left before it is locked: then another one."""
    while True:
        file = open(folder / f".rest-local-new-{secrets.token_hex(8)}", "xb", opener=_private)  # noqa: SIM115
        try:
            is_ours = _locked(file.fileno())
        except OSError:  # a file system without locks, where nobody deletes it either
            is_ours = True
        with contextlib.suppress(FileNotFoundError):
            if is_ours and os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
                return file
        file.close()


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _locked(descriptor: int) -> bool:
    """Lock an open file, unless another process has."""
    from filelock import lock_descriptor

    return lock_descriptor(descriptor, blocking=False)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
