"""Messages of the library speak of parameters, those of the command line of its options."""

from __future__ import annotations

import inspect
import io
import re
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

import rest_local
from rest_local.cli.main import cli, run
from rest_local.cli.terminal import fail, warn
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.request import Request
from rest_local.errors import OPTIONS, PromptTooLong, in_options
from rest_local.llama.options import ModelOptions
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.update.updating import update

LIBRARY = (
    "calibration",
    "chat",
    "decoding",
    "drafting",
    "editing",
    "grammar",
    "kv_cache",
    "llama",
    "planning",
    "retrieval",
)


def flags(command: click.Command) -> set[str]:
    found = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for child in getattr(command, "commands", {}).values():
        found |= flags(child)
    return found


def test_every_parameter_and_every_option_exists() -> None:
    parameters = {field.name for kind in (EngineConfig, ModelOptions, Request) for field in fields(kind)}
    parameters |= {name for call in (build_datastore, update) for name in inspect.signature(call).parameters}
    assert {name.partition("=")[0] for name in OPTIONS} <= parameters
    commands = [cli.get_command(click.Context(cli), name) for name in ("serve", "index", "edit", "bench")]
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


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_errors_and_warnings_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Screen())
    error = PromptTooLong(900, 64)
    assert fail(error) == in_options(str(error))
    warn(str(error))
    assert run(["no-such-command"]) == 2
    lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) < 40
    assert " ".join(" ".join(lines).split()) == (
        f"rest-local: error: {in_options(str(error))} rest-local: warning: {in_options(str(error))} "
        "rest-local: error: No such command 'no-such-command'; see `rest-local --help`"
    )
