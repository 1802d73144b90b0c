"""docs/CLI.md and docs/man are what the commands say, and a manual page prints any text as it is."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from fake_cli_engine import Call
from support.scripts import load_script

from rest_local.cli.main import COMMANDS, cli
from rest_local.cli.sections import WIDEST, commands_below, is_rare, summary

ROOT = Path(__file__).resolve().parents[2]
script: Any = load_script(ROOT / "scripts" / "reference.py", "reference")
needs_groff = pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")


def rendered(page: str) -> str:
    """The page as a wide terminal shows it, without the marks of bold and underlined letters; fails on a warning."""
    command = ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-o", "-P-u", "-rLL=2000n", "-rHY=0", "-ww", "-K", "utf8"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return " ".join(done.stdout.split())


def test_the_files_are_what_the_commands_say(tmp_path: Path) -> None:
    (tmp_path / "man").mkdir()
    (tmp_path / "man" / "rest-local-old.1").touch()
    script.write(tmp_path)
    made, kept = (
        {str(path.relative_to(folder)): path.read_text("utf-8") for path in (folder / "CLI.md", *folder.glob("man/*"))}
        for folder in (tmp_path, ROOT / "docs")
    )
    assert made == kept, "run `make docs`"
    assert {*made} == {"CLI.md", "man/rest-local.1", *(f"man/rest-local-{name}.1" for name in COMMANDS)}
    assert "\nrest\\-local config set top\\-k 20\n" in made["man/rest-local-config.1"].replace("\\&", ""), "a block"


@needs_groff
def test_the_manual_holds_every_option_and_its_help() -> None:
    shown = rendered("".join(script.pages().values()))
    for name in COMMANDS:
        assert f"rest-local-{name}(1)" in shown
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for each in (command, *getattr(command, "commands", {}).values()):
            for option in each.params:
                if isinstance(option, click.Option) and not option.hidden:
                    assert ", ".join((*option.opts, *option.secondary_opts)) in shown
                    assert " ".join((option.help or "").replace("`", "").split()) in shown


# ---- The layout of --help ------------------------------------------------------------------------------------------


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
