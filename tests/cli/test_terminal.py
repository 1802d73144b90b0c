"""What commands say: bars, questions, the line about an answer, errors and warnings in the words of the options."""

import inspect
import io
import re
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

import rest_local
from rest_local.cli import terminal
from rest_local.cli.main import cli
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.request import Request
from rest_local.decoding.results import DraftStatistics, Timings
from rest_local.decoding.stream import Result
from rest_local.errors import OPTIONS
from rest_local.llama.options import ModelOptions
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.update.updating import update


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_question_needs_a_terminal_and_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert terminal.can_ask()
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(terminal.can_ask).result()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not terminal.can_ask()


def answer(*sources: str, ms: float = 100.0, drafted: int = 8, plain_ms: float = 0.0) -> Result:
    return Result(
        tokens=list(range(len(sources))),
        sources=list(sources),
        timings=Timings(predicted_tokens=len(sources), predicted_ms=ms),
        draft=DraftStatistics(drafted=drafted, plain_step_ms=plain_ms),
    )


LIBRARY = (
    "calibration", "chat", "decoding", "drafting", "editing", "grammar", "kv_cache", "llama", "planning", "retrieval",
)  # fmt: skip


def flags(command: click.Command) -> set[str]:
    found = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for child in getattr(command, "commands", {}).values():
        found |= flags(child)
    return found


def test_every_parameter_and_every_option_exists() -> None:
    parameters = {field.name for kind in (EngineConfig, ModelOptions, Request) for field in fields(kind)}
    parameters |= {name for call in (build_datastore, update) for name in inspect.signature(call).parameters}
    assert {name.partition("=")[0] for name in OPTIONS} <= parameters
    commands = [cli.get_command(click.Context(cli), name) for name in ("serve", "index", "edit")]
    assert set(OPTIONS.values()) <= {flag for command in commands if command for flag in flags(command)}


@pytest.mark.parametrize("room", LIBRARY)
def test_no_message_of_the_library_names_an_option(room: str) -> None:
    """Texts in quotes that hold a flag, docstrings left out; parameters of git are none."""
    package = Path(rest_local.__file__).parent
    paths = [*(package / room).rglob("*.py"), package / "errors.py", package / "paths.py"]
    found = []
    for path in sorted(paths):
        code = re.sub(r'"""(.|\n)*?"""', "", path.read_text(encoding="utf-8"))
        code = re.sub(r"#.*", "", code)
        found += [f"{path.name}: {text}" for text in re.findall(r'"[^"\n]* --[a-z][^"\n]*"', code)]
    assert found == []
