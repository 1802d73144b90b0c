"""The manual pages: what docs/man holds is what the commands say, and any text is printed as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rest_local.cli.main import COMMANDS, cli
from rest_local.cli.manual import escape, line, pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = pages()


def rendered(page: str) -> str:
    """The page as a wide terminal shows it, without the marks of bold and underlined letters; fails on a warning."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-o", "-P-u", "-rLL=2000n", "-rHY=0", "-ww", "-K", "utf8"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return " ".join(done.stdout.split())


def test_pages_are_what_the_commands_say() -> None:
    folder = ROOT / "docs" / "man"
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == PAGES, "run `make docs`"


def test_there_is_a_page_for_every_command() -> None:
    assert set(PAGES) == {"rest-local.1", *(f"rest-local-{name}.1" for name in COMMANDS)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_holds_every_option_and_its_help(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    shown = rendered(PAGES[f"rest-local-{name}.1"]) + rendered(PAGES["rest-local.1"])
    for each in (command, *getattr(command, "commands", {}).values()):
        for option in each.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert ", ".join((*option.opts, *option.secondary_opts)) in shown
                assert " ".join((option.help or "").replace("`", "").split()) in shown


def test_blocks_keep_their_lines() -> None:
    assert ".nf\n" in PAGES["rest-local-config.1"]
    assert "\nrest\\-local config set top\\-k 20\n" in PAGES["rest-local-config.1"].replace("\\&", "")


def test_references_to_other_pages_lead_somewhere() -> None:
    shown = rendered(PAGES["rest-local.1"])
    for name in COMMANDS:
        assert f"rest-local-{name}(1)" in shown


PRINTED = st.text(st.characters(min_codepoint=33, max_codepoint=0x24F, exclude_categories=["Cc", "Cf", "Zs", "Mn"]))


@settings(max_examples=25)
@given(st.lists(PRINTED.filter(lambda word: "`" not in word), min_size=1, max_size=5))
@example([".TH", "\\fB\\n(.k"])
@example(["'quoted'", '"', "^~-\\"])
@example(["\\"])
def test_any_text_is_printed_as_it_is(words: list[str]) -> None:
    text = " ".join(words).strip()
    page = f".TH X 1\n.SH NAME\n{line(text)}\nend\n"
    shown = rendered(page)
    assert " ".join(text.split()) in shown
    assert shown.count("end") == 1 + text.count("end")


def test_words_in_backticks_are_bold() -> None:
    assert line("see `a-b` there") == "see \\fBa\\-b\\fR there"
    assert escape("`") == "\\(ga"


def test_writing_removes_the_pages_of_commands_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "rest-local-old.1").write_text("")
    (tmp_path / "other.1").write_text("")
    subprocess.run(
        [sys.executable, "-m", "rest_local.cli.reference", "--man", str(tmp_path)], check=True, cwd=ROOT, timeout=60
    )
    assert {path.name for path in tmp_path.iterdir()} == {"other.1", *PAGES}


def test_man_shows_it(tmp_path: Path) -> None:
    if shutil.which("man") is None:
        pytest.skip("man is not installed")
    page = tmp_path / "rest-local.1"
    page.write_text(PAGES["rest-local.1"])
    done = subprocess.run(
        ["man", "--warnings", "-l", str(page)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "REST-LOCAL(1)" in done.stdout
    assert done.stderr == ""
