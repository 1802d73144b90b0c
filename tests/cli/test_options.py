"""How -m and -d are resolved, and what happens to a default datastore that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rest_local.decoding.engine
from rest_local.cli import options
from rest_local.cli.options import EngineChoice
from rest_local.errors import DatastoreCorrupt, DatastoreVocabulary
from rest_local.planning.policies import POLICIES
from rest_local.retrieval import home


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the calls of `Engine.load`; one with a datastore called "default" is refused."""
    calls: list[dict[str, Any]] = []

    def load(model: Path, **arguments: Any) -> Any:
        calls.append({"model": model, **arguments})
        if any(path.name == "default" for path in arguments["datastores"]):
            raise DatastoreVocabulary("default", "a", "b", "rest-local index build")
        return SimpleNamespace(warnings=["one thing"])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", SimpleNamespace(load=load))
    return calls


def test_default_datastore_of_another_vocabulary_is_left_out_with_one_warning(
    loads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["default"])
    options.load_engine(EngineChoice(model="m.gguf"))
    assert [len(call["datastores"]) for call in loads] == [1, 0]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert "default datastore is not used" in warnings[0]
    assert warnings[1] == "rest-local: warning: one thing"


def test_unreadable_home_of_datastores_is_no_reason_to_refuse(
    loads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "file" / "below"))
    options.load_engine(EngineChoice(model="m.gguf"))
    assert loads[0]["datastores"] == []
    assert "Not a directory" in capsys.readouterr().err


def test_damaged_datastore_is_left_out_and_the_others_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[Path]] = []

    def load(model: Path, *, datastores: list[Path], **arguments: Any) -> Any:
        calls.append(datastores)
        if Path("/tmp/bad") in datastores:
            raise DatastoreCorrupt("/tmp/bad", "cut off")
        return SimpleNamespace(warnings=[])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", SimpleNamespace(load=load))
    options.load_engine(EngineChoice(datastore=("/tmp/bad", "/tmp/good")))
    assert calls[-1] == [Path("/tmp/good")]
    assert (
        capsys.readouterr().err
        == f"rest-local: warning: {DatastoreCorrupt('/tmp/bad', 'cut off')}; going on without it\n"
    )


def test_warnings_of_the_log_are_shown_but_not_those_of_llama_cpp(
    loads: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    options.load_engine(EngineChoice(model="m.gguf", policy="off"))
    options.load_engine(EngineChoice(model="m.gguf", policy="off"))
    capsys.readouterr()
    logging.getLogger("rest_local.drafting").warning("a datastore %s", "broke")
    logging.getLogger("rest_local.drafting").info("nothing to see")
    logging.getLogger("rest_local.llama").warning("n_ctx_seq < n_ctx_train")
    assert capsys.readouterr().err == "rest-local: warning: a datastore broke\n"


def test_datastore_that_was_asked_for_must_fit(loads: list[dict[str, Any]]) -> None:
    with pytest.raises(DatastoreVocabulary):
        options.load_engine(EngineChoice(model="m.gguf", datastore=("default",)))
    assert len(loads) == 1


def test_without_a_default_datastore_there_is_none(
    loads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["other"])
    options.load_engine(EngineChoice(model="m.gguf"))
    assert loads[0]["datastores"] == []


def test_choice_is_handed_over(loads: list[dict[str, Any]]) -> None:
    options.load_engine(EngineChoice("~/m.gguf", ("/tmp/a", "b"), 512, 2, 0, "off", True))
    (call,) = loads
    assert call["model"] == Path("~/m.gguf").expanduser()
    assert call["datastores"] == [Path("/tmp/a"), home.datastores_home() / "b"]
    assert (call["n_ctx"], call["threads"], call["n_gpu_layers"]) == (512, 2, 0)
    assert (call["policy"], call["exact"]) == ("off", True)


def test_policies_on_the_command_line_are_those_there_are() -> None:
    assert sorted(options.POLICY_NAMES) == sorted(POLICIES)


@pytest.mark.parametrize("more", [("--exact", "--verify", "relaxed"), ("--verify", "loose"), ("--policy", "best")])
def test_what_cannot_be_verified_so_is_refused_before_a_model_is_opened(
    call: Callable[..., Any], more: tuple[str, ...]
) -> None:
    done = call("generate", "x", "-m", "/nowhere/model.gguf", *more)
    assert done.code == 2
    assert "nowhere" not in done.err
