"""Which models are found in which stores, and what they are called."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rest_local.catalog.quantization import is_model_file, label_of
from rest_local.catalog.stores import HubName, hub_cache, hub_name, model_file, name_of, projector_of, stored_models
from rest_local.errors import ModelInvalid, ModelNotFound, ModelNotHere

Put = Callable[..., Path]


def ollama(put: Put, *parts: str, digest: str = "sha256:ab12", layers: Any = None) -> Path:
    """Make a model in Ollama's store, with a manifest at `parts`."""
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
    assert [(model.name, model.path, model.label) for model in stored_models()] == [
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
    assert [(model.name, model.path, model.repo) for model in stored_models()] == [
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
    assert [model.name for model in stored_models()] == [
        "hf.co/user/tiny-GGUF:Q4_K_M",
        "llama3.2:3b",
        "someone/coder:latest",
    ]
    assert {model.path for model in stored_models()} == {path}


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
    assert stored_models() == []


HUB = ("hf", "hub", "models--user--tiny-GGUF", "snapshots", "0001")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user/repo", HubName("user/repo", None)), ("user/repo:Q4_K_M", HubName("user/repo", "Q4_K_M")),
        ("hf.co/user/repo.v1:q8_0", HubName("user/repo.v1", "q8_0")),
        ("https://huggingface.co/user/repo/", HubName("user/repo", None)),
        ("hf://user/repo", HubName("user/repo", None)), ("repo", None), ("a/b/c", None), ("/a/b", None),
        ("../b", None), ("./b", None), ("user/repo:", None), ("user/re po", None), ("user/../repo", None),
    ],
)  # fmt: skip
def test_hub_names(text: str, expected: HubName | None) -> None:
    assert hub_name(text) == expected


def test_what_is_not_here_says_how_to_get_it(store: Put) -> None:
    with pytest.raises(ModelNotHere) as caught:
        model_file("user/tiny-GGUF:Q8_0")
    assert str(caught.value) == (
        "model user/tiny-GGUF:Q8_0: is not on this machine; `rest-local pull user/tiny-GGUF:Q8_0` downloads it"
    )
    store(*HUB, "tiny-Q4_K_M.gguf")
    with pytest.raises(ModelNotHere, match=r"is not on this machine \(user/tiny-GGUF:Q4_K_M is\); `rest-local pull"):
        model_file("user/tiny-GGUF:Q8_0")


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["gemma-3-4b-it-Q8_0.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-Q4_K_M.gguf", ["b-Q4_K_M.gguf", "mmproj-F16.gguf"], None),
        ("a-7b-Q4_K_M.gguf", ["b-7b-Q4_0.gguf", "mmproj-b-7b-f16.gguf"], None),
        ("b-7b-Q4_0.gguf", ["a-7b-Q4_K_M.gguf", "mmproj-b-7b-f16.gguf"], "mmproj-b-7b-f16.gguf"),
        (
            "Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf",
            ["mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf"],
            "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        ),
        ("Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf", ["mmproj-Qwen2.5-VL-72B-Instruct-f16.gguf", "c.gguf"], None),
        (
            "llava-v1.5-7b-Q4_K.gguf",
            ["llava-v1.5-7b-mmproj-model-f16.gguf", "x.gguf"],
            "llava-v1.5-7b-mmproj-model-f16.gguf",
        ),
        ("big-00001-of-00002.gguf", ["big-00002-of-00002.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("model.gguf", ["readme.md", "mmproj.txt", "vocab.gguf"], None),
        ("model.gguf", [], None),
    ],
)
def test_the_projector_next_to_a_model(model: str, others: list[str], expected: str | None, tmp_path: Path) -> None:
    for name in (model, *others):
        (tmp_path / name).touch()
    found = projector_of(tmp_path / model)
    assert (found and found.name) == expected


def test_the_projector_in_another_snapshot_of_the_repository(tmp_path: Path) -> None:
    """It was downloaded at another time, when the main branch was elsewhere."""
    shots = tmp_path / "models--user--repo" / "snapshots"
    for name in ("aaa/Q4/model-Q4_K_M.gguf", "bbb/mmproj-F16.gguf"):
        (shots / name).parent.mkdir(parents=True, exist_ok=True)
        (shots / name).touch()
    assert projector_of(shots / "aaa/Q4/model-Q4_K_M.gguf") == shots / "bbb/mmproj-F16.gguf"


# ---- The model that is used where none is named --------------------------------------------------------------------


def written(path: Path, size: int = 98_362_432) -> Path:
    path.write_bytes(b"GGUF")
    os.truncate(path, size)
    return path


def test_the_default_model_is_the_file_of_its_package(default_package: Path) -> None:
    path = written(default_package)
    assert model_file(None) == model_file("smollm2") == path
    (found,) = [model for model in stored_models() if model.store == "package"]
    assert (found.name, found.path, found.label) == ("SmolLM2", path, "Q4_1")
    assert (name_of(path), name_of(Path("other.gguf"))) == ("SmolLM2", "other")


def test_a_model_of_the_same_name_is_told_apart(default_package: Path, store: Put) -> None:
    path, own = written(default_package), store("models", "SmolLM2.gguf")
    assert [(model.name, model.path) for model in stored_models()] == [("SmolLM2", own), ("package/SmolLM2", path)]
    assert (model_file("SmolLM2"), model_file("package/SmolLM2"), model_file(None)) == (own, path, path)


def test_without_the_package_the_error_says_how_to_get_it(no_models: Path) -> None:
    for name in (None, "SmolLM2"):
        with pytest.raises(ModelNotFound, match=r"`pip install 'rest-local\[smollm2\]'` installs it, -m names another"):
            model_file(name)
    assert stored_models() == []


@pytest.mark.parametrize(
    ("size", "cause"),
    [
        (None, "cannot be read: No such file or directory"),
        (98_362_431, "has 98,362,431 bytes in place of 98,362,432: it is damaged, or of another version"),
    ],
)
def test_a_package_with_another_file_is_refused_by_its_path(
    size: int | None, cause: str, default_package: Path
) -> None:
    if size is not None:
        written(default_package, size)
    with pytest.raises(ModelInvalid, match=re.escape(f"model {default_package}: {cause}; `pip install --force")):
        model_file(None)


# ---- Names of files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"), ("Llama-3.2-3B-Instruct-Q8_0.gguf", "Q8_0"),
        ("gemma-3-4b-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("model.Q4_K_S.gguf", "Q4_K_S"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"), ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("X-IQ2_XXS.gguf", "IQ2_XXS"), ("X-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("X-TQ1_0.gguf", "TQ1_0"), ("q8_0/plain.gguf", "plain"), ("Qwen3.gguf", "Qwen3"), ("f16ish.gguf", "f16ish"),
    ],
)  # fmt: skip
def test_label(path: str, label: str) -> None:
    assert label_of(path) == label


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.gguf", True), ("a/B.GGUF", True), ("a/mmproj-B-f16.gguf", False), ("B.imatrix.gguf", False),
        ("ggml-vocab-qwen2.gguf", False), ("B.safetensors", False),
    ],
)  # fmt: skip
def test_files_that_are_no_models(path: str, expected: bool) -> None:
    assert is_model_file(path) is expected
