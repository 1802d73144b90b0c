"""What is deleted, what stays, and what is not ours to delete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hub_server import HubServer

from rest_local.catalog.hub import Hub, pull_model, removal_of
from rest_local.catalog.stores import find_model
from rest_local.errors import ModelNotFound, ModelNotOurs

REPO = "user/tiny-GGUF"
Put = Callable[..., Path]


def remove(name: str) -> int:
    removal = removal_of(find_model(name))
    removal.run()
    return removal.bytes


def test_one_quantization_goes_and_the_others_stay(hub: Hub) -> None:
    gone, stays = pull_model(f"{REPO}:Q8_0", hub=hub), pull_model(f"{REPO}:Q4_K_M", hub=hub)
    blob = gone.resolve()
    assert remove(f"{REPO}:Q8_0") == 30_000
    assert not gone.exists()
    assert not blob.exists()
    assert stays.exists()
    with pytest.raises(ModelNotFound):
        find_model(f"{REPO}:Q8_0")


def test_all_parts_go_and_with_the_last_model_the_repository(hub: Hub) -> None:
    path = pull_model(f"{REPO}:F16", hub=hub)
    assert remove(f"{REPO}:F16") == 93_000
    assert not path.parents[2].exists()


def test_a_blob_that_another_file_has_as_well_stays(hub: Hub, hub_server: HubServer) -> None:
    hub_server.repos[REPO]["same-Q5_0.gguf"] = hub_server.repos[REPO]["tiny-Q8_0.gguf"]
    pull_model(f"{REPO}:Q8_0", hub=hub)
    same = pull_model(f"{REPO}:Q5_0", hub=hub)
    assert remove(f"{REPO}:Q8_0") == 0
    assert same.read_bytes() == hub_server.repos[REPO]["tiny-Q8_0.gguf"]


def test_older_snapshots_of_the_file_go_too(hub: Hub, hub_server: HubServer) -> None:
    old = pull_model(f"{REPO}:Q8_0", hub=hub)
    hub_server.commit = "f" * 40
    hub_server.repos[REPO]["tiny-Q8_0.gguf"] = b"GGUF newer" * 100
    new = pull_model(f"{REPO}:Q8_0", hub=hub)
    assert old.exists()
    assert find_model(f"{REPO}:Q8_0").path == new
    assert remove(f"{REPO}:Q8_0") == 31_000
    assert not old.exists()


def test_others_models_are_not_ours(store: Put, no_models: Path) -> None:
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}]
    manifest = ("registry.ollama.ai", "library", "llama3.2", "3b")
    store(".ollama", "models", "manifests", *manifest, content=json.dumps({"layers": layers}).encode())
    store(".ollama", "models", "blobs", "sha256-ab")
    store(".lmstudio", "models", "user", "tiny-GGUF", "tiny-Q6_K.gguf")
    own = store("models", "my own.gguf")
    for name, expected in (
        ("llama3.2:3b", "belongs to Ollama; `ollama rm llama3.2:3b` deletes it"),
        ("user/tiny-GGUF:Q6_K", "belongs to LM Studio; delete it there"),
        ("my own", f"belongs to a folder of your own; `rm '{own}'` deletes it"),
        ("demo", "belongs to rest-local itself"),
    ):
        with pytest.raises(ModelNotOurs) as caught:
            removal_of(find_model(name))
        assert expected in str(caught.value)
    assert own.exists()
