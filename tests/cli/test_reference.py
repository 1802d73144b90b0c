"""docs/CLI.md is what the commands say, and help fits into a terminal."""

from pathlib import Path
from typing import Any

import click
import pytest
from fake_cli_engine import Call
from support.scripts import load_script

from rest_local.cli.main import cli
from rest_local.cli.sections import WIDEST, commands_below, is_rare, summary

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_commands_say() -> None:
    script: Any = load_script(ROOT / "scripts" / "reference.py", "reference")
    assert script.reference() == (ROOT / "docs" / "CLI.md").read_text("utf-8"), "run `make docs`"


EVERY = tuple(commands_below(cli))
NAMES = [" ".join(path) or "rest-local" for path, _ in EVERY]


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize(("path", "command"), EVERY, ids=NAMES)
def test_help_fits_and_is_whole(
    call: Call, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: click.Command, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    options = [option for option in command.params if isinstance(option, click.Option)]
    done = call(*path, "--help-all" if any(map(is_rare, options)) else "--help")
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= min(columns, WIDEST)
    shown = one_line(done.out)
    for option in options:
        assert option.hidden or one_line(option.help or "") in shown
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            assert summary(child) in shown
