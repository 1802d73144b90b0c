"""The layout of --help: it fits the terminal, cuts nothing off, and leaves the text enough room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

from rest_local.cli.main import cli
from rest_local.cli.sections import WIDEST, summary

Call = Callable[..., Any]


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, (*path, name))


COMMANDS = tuple(commands(cli))
NAMES = [" ".join(path) or "rest-local" for path, _ in COMMANDS]


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_help_fits_and_is_whole(
    call: Call, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: click.Command, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = call(*path, "--help")
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= min(columns, WIDEST)
    shown = one_line(done.out)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert one_line(parameter.help or "") in shown
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            assert summary(child) in shown


@pytest.mark.parametrize("columns", [60, 80])
def test_the_text_of_options_has_more_than_half_of_the_width(
    call: Call, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = call("generate", "--help").out.splitlines()
    indents = {len(line) - len(line.lstrip()) for line in lines if line.startswith(" " * 6)}
    assert max(indents) < columns / 2


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=NAMES)
def test_a_summary_is_one_sentence_without_its_end_cut_off(path: tuple[str, ...]) -> None:
    command = dict(COMMANDS)[path]
    assert summary(command)
    assert not summary(command).endswith("...")


def test_arguments_are_no_options(call: Call) -> None:
    assert "\n  [PROMPT" not in call("generate", "--help").out
