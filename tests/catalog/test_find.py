"""What -m means: paths, names, repositories, and what is close to a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.catalog.stores import HubName, hub_name, model_file
from rest_local.errors import ModelNotFound, ModelNotHere

Put = Callable[..., Path]
HUB = ("hf", "hub", "models--user--tiny-GGUF", "snapshots", "0001")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user/repo", HubName("user/repo", None)),
        ("user/repo:Q4_K_M", HubName("user/repo", "Q4_K_M")),
        ("hf.co/user/repo.v1:q8_0", HubName("user/repo.v1", "q8_0")),
        ("https://huggingface.co/user/repo/", HubName("user/repo", None)),
        ("hf://user/repo", HubName("user/repo", None)),
        ("repo", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("../b", None),
        ("./b", None),
        ("user/repo:", None),
        ("user/re po", None),
        ("user/../repo", None),
    ],
)
def test_hub_names(text: str, expected: HubName | None) -> None:
    assert hub_name(text) == expected


def test_a_file_is_preferred_to_a_name(store: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = store("models", "mine.gguf")
    monkeypatch.chdir(tmp_path)
    assert model_file("mine") == named
    (tmp_path / "mine").mkdir()
    assert model_file("mine") == named, "a directory is no model"
    (tmp_path / "mine").rmdir()
    (tmp_path / "mine").write_bytes(b"GGUF")
    assert model_file("mine") == Path("mine")


def test_a_directory_without_a_model_of_its_name_is_left_to_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert model_file("folder") == Path("folder")


@pytest.mark.parametrize(
    "name", ["user/tiny-GGUF:Q8_0", "USER/tiny-gguf:q8_0", "user/tiny-GGUF:tiny-Q8_0.gguf", "hf.co/user/tiny-GGUF:Q8_0"]
)
def test_a_quantization_of_a_repository(store: Put, name: str) -> None:
    store(*HUB, "tiny-Q4_K_M.gguf")
    path = store(*HUB, "tiny-Q8_0.gguf")
    assert model_file(name) == path


def test_a_repository_without_a_quantization_is_the_usual_one(store: Put) -> None:
    store(*HUB, "tiny-BF16.gguf")
    assert model_file("user/tiny-GGUF").name == "tiny-BF16.gguf"
    usual = store(*HUB, "tiny-Q4_K_M.gguf")
    store(*HUB, "tiny-Q8_0.gguf")
    assert model_file("user/tiny-GGUF") == usual


def test_what_is_not_here_says_how_to_get_it(store: Put) -> None:
    with pytest.raises(ModelNotHere) as caught:
        model_file("user/tiny-GGUF:Q8_0")
    assert str(caught.value) == (
        "model user/tiny-GGUF:Q8_0: is not on this machine; `rest-local pull user/tiny-GGUF:Q8_0` downloads it"
    )
    store(*HUB, "tiny-Q4_K_M.gguf")
    with pytest.raises(ModelNotHere, match=r"is not on this machine \(user/tiny-GGUF:Q4_K_M is\); `rest-local pull"):
        model_file("user/tiny-GGUF:Q8_0")


def test_an_unknown_name_suggests_those_that_are_close(store: Put) -> None:
    store("models", "qwen2.5-coder-q4_0.gguf")
    with pytest.raises(ModelNotFound) as caught:
        model_file("qwen2.5-code-q4_0")
    assert str(caught.value) == (
        "model qwen2.5-code-q4_0: no such file, and no model of that name; "
        "did you mean qwen2.5-coder-q4_0? `rest-local models` lists all"
    )
    with pytest.raises(ModelNotFound, match=r"did you mean qwen2\.5-coder-q4_0\?"):
        model_file("CODER")
    with pytest.raises(ModelNotFound, match="that name; `rest-local models` lists all"):
        model_file("zzz")
