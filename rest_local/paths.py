"""The directories of rest-local: a cache that can be deleted at any time, and data that cannot; and the configuration.

Directories are made on first use, readable by the user only (0700).
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from rest_local.errors import ModelNotFound


def cache_dir() -> Path:
    """Results that can be measured again (probes, cost curves, self-tests): `$REST_LOCAL_CACHE`, or the platform's
    user cache directory. Raises OSError where it cannot be made."""
    given = os.environ.get("REST_LOCAL_CACHE") or platformdirs.user_cache_dir("rest-local", appauthor=False)
    return _made(Path(given).expanduser())


def data_dir() -> Path:
    """The user's data (datastores, history): `$REST_LOCAL_DATA`, or the platform's user data directory.
    Raises OSError where it cannot be made."""
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
    """The configuration of the command line, which need not exist: `$REST_LOCAL_CONFIG`, or `config.toml` in the
    platform's user configuration directory."""
    given = os.environ.get("REST_LOCAL_CONFIG")
    if given:
        return Path(given).expanduser()
    return Path(platformdirs.user_config_dir("rest-local", appauthor=False)) / "config.toml"


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace `path` as a whole: a reader sees the old content or the new content, never a part. Raises OSError.

    It is synced to disk only if `durable`. Else the file may be gone or empty after a power cut, which a cache can
    bear.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def demo_model() -> Path:
    """The demo model: package data where installed, `models/demo.gguf` in a checkout. Raises ModelNotFound."""
    package = Path(__file__).resolve().parent
    places = (package / "data" / "demo.gguf", package.parent / "models" / "demo.gguf")
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelNotFound(places[-1])
    return found


def is_demo_model(path: Path) -> bool:
    """Whether a file is the demo model, which completes Python: its chat template serves to try the APIs only."""
    try:
        return path.resolve() == demo_model().resolve()
    except ModelNotFound:
        return False
