"""How -m and -d are resolved, and which datastores are opened."""

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
from rest_local.errors import ModelError
from rest_local.retrieval import home


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Record the engines that are opened. What becomes of a datastore that does not fit is in test_missing."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig, unusable: object) -> Any:
        configs.append(config)
        return SimpleNamespace(warnings=["one thing"])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_the_default_datastore_is_opened_where_there_is_one(
    opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["default"])
    opening.open_engine(EngineConfig(model="m.gguf"))
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    opening.open_engine(EngineConfig(model="m.gguf", datastores=("mine",)))
    assert [config.datastores for config in opened] == [("default",), (), ("mine",)]
    assert capsys.readouterr().err == "rest-local: warning: one thing\n" * 3


def test_unreadable_home_of_datastores_is_no_reason_to_refuse(
    opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "file" / "below"))
    opening.open_engine(EngineConfig(model="m.gguf"))
    assert opened[0].datastores == ()
    assert "Not a directory" in capsys.readouterr().err


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


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The engines that commands ask for; none is opened."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig, unusable: object) -> Any:
        configs.append(config)
        raise ModelError("as far as here")

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_options_are_the_fields_of_the_config(asked_for: list[EngineConfig], call: Callable[..., Any]) -> None:
    given = shlex.split(
        "-m ~/m.gguf -d /tmp/a -d b --ctx 512 -t 2 -ngl 0 --policy off --verify relaxed:5,0.25 --context-shift"
        " -md d.gguf -ngld all --no-history --build-missing"
    )
    assert call("generate", "x", *given).err.endswith("error: as far as here\n")
    assert asked_for == [
        EngineConfig(
            model=Path("~/m.gguf").expanduser(),
            datastores=("/tmp/a", "b"),
            build_missing=True,
            follow=True,
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


@pytest.mark.parametrize("more", [("--exact", "--verify", "relaxed"), ("--verify", "loose"), ("--policy", "best")])
def test_what_cannot_be_verified_so_is_refused_before_a_model_is_opened(
    call: Callable[..., Any], more: tuple[str, ...]
) -> None:
    done = call("generate", "x", "-m", "/nowhere/model.gguf", *more)
    assert done.code == 2
    assert "nowhere" not in done.err
