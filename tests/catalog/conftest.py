"""Fixtures of the catalogue's tests: stores that are empty, and a stand-in for the hub."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub_server import HubServer, serving

from rest_local.catalog.hub import Hub

FILES = {
    "README.md": b"# a model",
    "tiny-Q4_K_M.gguf": b"GGUF four bits" * 1000,
    "tiny-Q8_0.gguf": b"GGUF eight bits" * 2000,
    "tiny-f16-00001-of-00002.gguf": b"GGUF first part" * 3000,
    "tiny-f16-00002-of-00002.gguf": b"GGUF second part" * 3000,
    "mmproj-tiny-f16.gguf": b"GGUF of images" * 10,
}


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the user's models, caches and tokens. Return the home directory that is used instead."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("REST_LOCAL_MODELS", str(home / "models"))
    monkeypatch.setenv("REST_LOCAL_CACHE", str(home / "cache"))
    monkeypatch.setattr("rest_local.catalog.stores.find_spec", lambda name: None)
    return home


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Yield a hub on loopback with the repository `user/tiny-GGUF`. The library takes small pieces, and no token."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serving() as server:
        server.repos["user/tiny-GGUF"] = dict(FILES)
        yield server


@pytest.fixture
def hub(hub_server: HubServer, no_models: Path) -> Hub:
    return Hub(endpoint=hub_server.url, cache=no_models / "hf" / "hub")


@pytest.fixture
def store(no_models: Path) -> Callable[..., Path]:
    """Return a function that puts a file into a store: `store("models", "a.gguf")`, below the home directory."""

    def put(*parts: str, content: bytes = b"GGUF") -> Path:
        path = no_models.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return put
