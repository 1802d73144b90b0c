"""What commands say: bars, questions, the line about an answer, errors and warnings in the words of the options."""

from __future__ import annotations

import inspect
import io
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import rest_local
from rest_local.cli import terminal
from rest_local.cli.main import cli, run
from rest_local.cli.terminal import drafted_share, fail, statistics_line, warn
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.request import Request
from rest_local.decoding.results import DraftStatistics, Timings
from rest_local.decoding.stream import Result
from rest_local.errors import OPTIONS, PromptTooLong, in_options
from rest_local.llama.options import ModelOptions
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.update.updating import update

SOURCE: Any = SimpleNamespace(measure=lambda: (1, 1000))
NEVER: Any = SimpleNamespace(measure=lambda: pytest.fail("walked for nothing"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, *steps: tuple[str, int]) -> str:
    """The bar after these steps of a build of 1 000 bytes."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in {"COLUMNS": str(width), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with terminal.build_bar(False, [SOURCE]) as progress:
        for step in steps:
            progress(*step)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", lines)
    return [line for line in lines.splitlines() if "tokenizing" in line or "sorting" in line][-1]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_shows_share_tokens_speed_and_time_left(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    shown = drawn(monkeypatch, width, ("read", 250), ("tokenized", 81))
    assert re.search(r"tokenizing .* 25% 81 tokens, [\d,]+/s -?[\d-]+:[\d-]+", shown), shown
    shown = drawn(monkeypatch, width, ("read", 250), ("read", 750), ("tokenized", 81), ("sorted", 81))
    assert re.search(r"sorting .*100% 81 tokens", shown), shown


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


def test_speed_comparison_and_source_of_an_answer() -> None:
    result = answer(*["datastore"] * 6, *["target"] * 4, plain_ms=20.0)
    assert statistics_line(result, ["mycode"]) == "100 tokens/s, 2.0 x plain, 60% from mycode"


def test_sources_are_listed_by_their_share() -> None:
    result = answer(*["context"] * 2, *["datastore"] * 5, *["target"] * 3)
    assert drafted_share(result, ["a", "b"]) == "70% from datastores 50%, context 20%"


@pytest.mark.parametrize(("drafted", "said"), [(0, "nothing drafted"), (8, "no draft accepted")])
def test_an_answer_without_accepted_drafts_says_so(drafted: int, said: str) -> None:
    assert drafted_share(answer("target", drafted=drafted)) == said


@pytest.mark.parametrize(
    ("tokens", "drafted", "plain_ms", "times"),
    [(3, 8, 20.0, None), (4, 8, 20.0, 2.0), (40, 0, 20.0, None), (40, 8, 0.0, None)],
)
def test_a_short_answer_and_one_without_drafts_are_not_compared(
    tokens: int, drafted: int, plain_ms: float, times: float | None
) -> None:
    assert answer(*["target"] * tokens, ms=10.0 * tokens, drafted=drafted, plain_ms=plain_ms).speedup == times


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
