"""docs/CLI.md and docs/man are what the commands say, and a manual page prints any text as it is."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from support.scripts import load_script

from rest_local.cli.main import COMMANDS, cli

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
