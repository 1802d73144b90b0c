"""Which models are found in which stores, and what they are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rest_local.catalog.stores import StoredModel, hub_cache, stored_models

Put = Callable[..., Path]


def others() -> list[StoredModel]:
    """All but the demo model, which is everywhere."""
    return [model for model in stored_models() if model.store != "demo"]


def ollama(put: Put, *parts: str, digest: str = "sha256:ab12", layers: Any = None) -> Path:
    """A model in Ollama's store, with a manifest at `parts`."""
    if layers is None:
        layers = [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:ffff"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
        ]
    put(".ollama", "models", "manifests", *parts, content=json.dumps({"layers": layers}).encode())
    return put(".ollama", "models", "blobs", digest.replace(":", "-"))


def test_own_folders(store: Put, monkeypatch: pytest.MonkeyPatch, no_models: Path) -> None:
    small, parts = store("models", "small-Q8_0.gguf"), store("models", "deep", "er", "large-Q4_0-00001-of-00002.gguf")
    for other in ("large-Q4_0-00002-of-00002.gguf", "mmproj-f16.gguf", "readme.md", ".hidden.gguf"):
        store("models", "deep", "er", other)
    second = store("more", "another.gguf")
    monkeypatch.setenv("REST_LOCAL_MODELS", f"{no_models}/models:~/more:/nowhere")
    assert [(model.name, model.path, model.label) for model in others()] == [
        ("large-Q4_0", parts, "Q4_0"),
        ("small-Q8_0", small, "Q8_0"),
        ("another", second, "another"),
    ]


def test_the_hub_cache_in_its_main_snapshot(store: Put) -> None:
    hub = ("hf", "hub", "models--user--tiny-GGUF")
    store(*hub, "snapshots", "ffff", "tiny-q4_k_m.gguf")
    main = store(*hub, "snapshots", "0001", "tiny-q4_k_m.gguf")
    older = store(*hub, "snapshots", "ffff", "sub", "tiny-Q8_0-00001-of-00002.gguf")
    store(*hub, "refs", "main", content=b"0001")
    store("hf", "hub", "datasets--user--data", "snapshots", "0001", "a.gguf")
    (main.parent / "gone-Q4_0.gguf").symlink_to("../../blobs/gone")
    assert [(model.name, model.path, model.repo) for model in others()] == [
        ("user/tiny-GGUF:Q8_0", older, "user/tiny-GGUF"),
        ("user/tiny-GGUF:Q4_K_M", main, "user/tiny-GGUF"),
    ]


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", None])
def test_the_hub_cache_is_where_the_library_has_it(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import importlib

    monkeypatch.delenv("HF_HOME")
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "$WHERE" / "cache"))
        monkeypatch.setenv("WHERE", "there")
    try:
        importlib.reload(constants)
        assert str(hub_cache()) == constants.HF_HUB_CACHE
    finally:
        monkeypatch.undo()
        importlib.reload(constants)


def test_ollama_names_as_ollama_lists_them(store: Put) -> None:
    path = ollama(store, "registry.ollama.ai", "library", "llama3.2", "3b")
    ollama(store, "registry.ollama.ai", "someone", "coder", "latest")
    ollama(store, "hf.co", "user", "tiny-GGUF", "Q4_K_M")
    assert [model.name for model in others()] == ["hf.co/user/tiny-GGUF:Q4_K_M", "llama3.2:3b", "someone/coder:latest"]
    assert {model.path for model in others()} == {path}


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../../secret"}],
        [{"mediaType": "application/vnd.ollama.image.model", "digest": 7}],
        [{"mediaType": "application/vnd.ollama.image.model"}],
        "none",
        None,
        7,
    ],
)
def test_a_manifest_that_is_none_holds_nothing(store: Put, layers: Any) -> None:
    content = b"[[[[" if layers is None else json.dumps({"layers": layers}).encode()
    store(".ollama", "models", "manifests", "registry.ollama.ai", "library", "bad", "1b", content=content)
    store("secret")
    assert others() == []


def test_the_same_name_in_two_stores(store: Put, monkeypatch: pytest.MonkeyPatch, no_models: Path) -> None:
    store("hf", "hub", "models--user--tiny-GGUF", "snapshots", "0001", "tiny-Q4_0.gguf")
    store(".lmstudio", "models", "user", "tiny-GGUF", "tiny-Q4_0.gguf")
    store(".cache", "lm-studio", "models", "user", "tiny-GGUF", "tiny-Q4_0.gguf")
    first, last = [f"user/tiny-GGUF:{name}" for name in ("Q4_0",)] * 2
    found = [model.name for model in others()]
    assert found[:2] == [first, f"lmstudio/{last}"]
    assert found[2] == str(no_models / ".cache/lm-studio/models/user/tiny-GGUF/tiny-Q4_0.gguf")


def test_a_folder_that_cannot_be_read_holds_nothing(monkeypatch: pytest.MonkeyPatch, store: Put) -> None:
    file = store("a-file")
    monkeypatch.setenv("REST_LOCAL_MODELS", str(file))
    assert others() == []
