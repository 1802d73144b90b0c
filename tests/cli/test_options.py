"""How -m and -d are resolved, and what happens to a default datastore that does not fit."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rest_local.decoding.engine
from rest_local.cli import opening
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.verify import Relaxed
from rest_local.errors import DatastoreCorrupt, DatastoreVocabulary, ModelError
from rest_local.retrieval import home


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Record the engines that are opened; one with a datastore called "default" is refused."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig) -> Any:
        configs.append(config)
        if "default" in config.datastores:
            raise DatastoreVocabulary("default", "a", "b", "rest-local index build")
        return SimpleNamespace(warnings=["one thing"])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_default_datastore_of_another_vocabulary_is_left_out_with_one_warning(
    opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["default"])
    opening.open_engine(EngineConfig(model="m.gguf"))
    assert [len(config.datastores) for config in opened] == [1, 0]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert "default datastore is not used" in warnings[0]
    assert warnings[1] == "rest-local: warning: one thing"


def test_unreadable_home_of_datastores_is_no_reason_to_refuse(
    opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "file" / "below"))
    opening.open_engine(EngineConfig(model="m.gguf"))
    assert opened[0].datastores == ()
    assert "Not a directory" in capsys.readouterr().err


def test_damaged_datastore_is_left_out_and_the_others_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[Any, ...]] = []

    def engine(config: EngineConfig) -> Any:
        tried.append(tuple(config.datastores))
        if "/tmp/bad" in config.datastores:
            raise DatastoreCorrupt("/tmp/bad", "cut off")
        return SimpleNamespace(warnings=[])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    opening.open_engine(EngineConfig(datastores=("/tmp/bad", "/tmp/good")))
    assert tried[-1] == ("/tmp/good",)
    assert (
        capsys.readouterr().err
        == f"rest-local: warning: {DatastoreCorrupt('/tmp/bad', 'cut off')}; going on without it\n"
    )


def test_warnings_of_the_log_are_shown_but_not_those_of_llama_cpp(
    opened: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    capsys.readouterr()
    logging.getLogger("rest_local.drafting").warning("a datastore %s", "broke")
    logging.getLogger("rest_local.drafting").info("nothing to see")
    logging.getLogger("rest_local.llama").warning("n_ctx_seq < n_ctx_train")
    assert capsys.readouterr().err == "rest-local: warning: a datastore broke\n"


def test_datastore_that_was_asked_for_must_fit(opened: list[EngineConfig]) -> None:
    with pytest.raises(DatastoreVocabulary):
        opening.open_engine(EngineConfig(model="m.gguf", datastores=("default",)))
    assert len(opened) == 1


def test_without_a_default_datastore_there_is_none(opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["other"])
    opening.open_engine(EngineConfig(model="m.gguf"))
    assert opened[0].datastores == ()


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The engines that commands ask for; none is opened."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig) -> Any:
        configs.append(config)
        raise ModelError("as far as here")

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_options_are_the_fields_of_the_config(asked_for: list[EngineConfig], call: Callable[..., Any]) -> None:
    given = shlex.split(
        "-m ~/m.gguf -d /tmp/a -d b --ctx 512 -t 2 -ngl 0 --policy off --verify relaxed:5,0.25 --context-shift"
        " -md d.gguf -ngld all --no-history"
    )
    assert call("generate", "x", *given).err.endswith("error: as far as here\n")
    assert asked_for == [
        EngineConfig(
            model=Path("~/m.gguf").expanduser(),
            datastores=("/tmp/a", "b"),
            n_ctx=512,
            threads=2,
            n_gpu_layers=0,
            policy="off",
            verify=Relaxed(5, 0.25),
            context_shift=True,
            draft_model="d.gguf",
            draft_gpu_layers=-1,
        )
    ]


def test_options_that_are_not_given_are_the_defaults_of_the_config(
    asked_for: list[EngineConfig], call: Callable[..., Any]
) -> None:
    assert call("doctor").code == 1
    assert asked_for == [EngineConfig()]


@pytest.mark.parametrize("more", [("--exact", "--verify", "relaxed"), ("--verify", "loose"), ("--policy", "best")])
def test_what_cannot_be_verified_so_is_refused_before_a_model_is_opened(
    call: Callable[..., Any], more: tuple[str, ...]
) -> None:
    done = call("generate", "x", "-m", "/nowhere/model.gguf", *more)
    assert done.code == 2
    assert "nowhere" not in done.err
