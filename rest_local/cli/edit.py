"""`rest-local edit`: let a model change files as an instruction says, show the changes, and write them once confirmed.

All files are written at the end, so an interrupt before that leaves every one of them as it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion, indexer, inputs, opening, options
from rest_local.cli.indexer import Live
from rest_local.cli.sections import SectionedCommand, option
from rest_local.cli.terminal import Bar, counted, fail, line_of, say, warn
from rest_local.decoding.config import EngineConfig
from rest_local.editing.text_file import TextFile, lines_of, write_whole
from rest_local.errors import EditRefused, InputInvalid, PromptTooLong, RestLocalError, printable
from rest_local.llama.options import Sampling

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result
    from rest_local.grammar.grammar import Grammar

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def unified_diff(path: Path, old: str, new: str) -> Iterator[str]:
    """Yield the lines of a patch as `patch -p1` reads it (`-p0` for absolute paths). No change yields no lines."""
    from difflib import unified_diff as lines_changed

    name = printable(path.as_posix())
    names = (name, name) if path.is_absolute() else (f"a/{name}", f"b/{name}")
    before, after = ([line + end for line, end in lines_of(text)] for text in (old, new))
    for line in lines_changed(before, after, *names):
        if line.endswith("\n"):
            yield line
        else:
            yield from (f"{line}\n", "\\ No newline at end of file\n")


def coloured(line: str) -> str:
    """Return a line of a diff without its end, coloured for a terminal that allows it, and with no other control
    characters.
    """
    shown = "\t".join(map(printable, line.rstrip("\r\n").replace("\ufeff", "").split("\t")))
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return shown
    if line.startswith(("--- ", "+++ ")):
        return click.style(shown, bold=True)
    return click.style(shown, fg=_COLOURS.get(line[:1]))


ASK, WRITE, SHOW = "ask", "write", "show"


@click.command(cls=SectionedCommand)
@click.argument("arguments", nargs=-1, metavar='FILE... "INSTRUCTION"', shell_complete=completion.paths)
@options.engine_options
@options.history_option
@indexer.code_options
@option("-y --yes", "Write without asking.", configurable=False)
@options.tokens_option(-1, "Generate at most N tokens a file. -1 goes on until the answer ends or the context is full.")
@options.quiet_option
@options.sampling_options
@option("--json", "Print one line of JSON for each file instead.", to="as_json")
def edit(
    arguments: tuple[str, ...],
    config: EngineConfig,
    live: Live,
    grammar: Grammar | None,
    yes: bool,
    tokens: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Change each FILE as INSTRUCTION says, show the difference, and write it when you confirm.

    The model answers with the whole new file. The unchanged parts are drafted, so most of the answer costs little.
    Without a terminal the difference is printed as a patch, and nothing is written without --yes. The exit code is 1 if
    a file was refused, or would change and may not be written. The answer to a refused file is kept in a temporary
    file, unless you give --no-history.
    """
    # Edits are greedy by default: the sampling that a model file recommends is for conversations.
    sampling = Sampling(**config.sampling, grammar=grammar)
    paths, instruction = read_arguments(arguments)
    files = read_files(paths)
    do = WRITE if yes else ASK if _at_terminal() and not as_json else SHOW
    config = replace(config, model=inputs.model_path(config.model))  # Refuse before `live.chosen` asks.
    with opening.open_engine(config, live.chosen()) as engine:
        way_out = "take one that was trained to chat, often with 'instruct' or 'it' in its name"
        opening.require_template(engine, "follow an instruction", way_out)
        how: dict[str, Any] = {"quiet": quiet, "as_json": as_json, "keeps": config.history}
        edits = Edits(engine, instruction, sampling, tokens, do, **how)
        try:
            for file in files:
                edits.edit(file)
                indexer.show_news()
        except (KeyboardInterrupt, click.Abort) as stop:
            say("\n" * isinstance(stop, click.Abort) + "interrupted; no file was changed")  # It ends a question's line.
            raise KeyboardInterrupt from stop
    edits.write()
    if edits.failed:
        raise click.exceptions.Exit(1)


def read_arguments(arguments: Sequence[str]) -> tuple[list[Path], str]:
    """Return the files and the instruction, which is the last argument. Raises UsageError."""
    names, instruction = arguments[:-1], inputs.clean("".join(arguments[-1:]), "instruction")
    if names and os.path.isfile(instruction):  # `Path.is_file` would raise for a long text.
        raise click.UsageError(f"the last argument is the instruction, but {instruction} is a file; say what to do")
    if not names:
        raise click.UsageError('give FILE and an instruction, for example: rest-local edit a.py "rename x to y"')
    if not instruction.strip():
        raise click.UsageError("the instruction is empty; say what to do")
    return [Path(name) for name in names], instruction


def read_files(paths: Sequence[Path]) -> list[TextFile]:
    """Read all files, each once. Raises InputInvalid for the first that cannot be edited."""
    missing = next((path for path in paths if len(paths) > 1 and not os.path.lexists(path)), None)
    if missing is not None:
        raise InputInvalid("file", missing, "does not exist; put the instruction in quotes if this is a part of it")
    files = [TextFile.read(path) for path in paths]
    return list({file.target: file for file in reversed(files)}.values())[::-1]


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@dataclass
class Change:
    """The result of editing one file. `content` is the text to write, or None if the file was refused."""

    file: TextFile
    result: Result | None = None
    speedup: float | None = None
    content: bytes | None = None
    error: str = ""
    answer_file: str | None = None
    accepted: bool = False
    written: bool = False

    def diff(self) -> list[str]:
        if self.content is None:
            return []
        return list(unified_diff(self.file.path, *(text.decode("utf-8") for text in (self.file.content, self.content))))

    def to_json(self) -> str:
        facts: dict[str, Any] = {
            "file": str(self.file.path),
            "diff": "".join(self.diff()),
            "written": self.written,
            "error": self.error or None,
            "answer": self.answer_file,
            "speedup": None if self.speedup is None else round(self.speedup, 3),
        }
        return json.dumps({**facts, **(self.result.to_dict() if self.result else {})})


@dataclass
class Edits:
    """A run of edits: one file after the other is edited, and the accepted changes are written at the end.

    `do` is ASK, WRITE or SHOW. `keeps` says whether the answer to a refused file is kept. `failed` becomes true when a
    file was refused, or would change and may not.
    """

    engine: Engine
    instruction: str
    sampling: Sampling
    tokens: int
    do: str
    quiet: bool
    as_json: bool
    keeps: bool
    failed: bool = False
    _changes: list[Change] = field(default_factory=list)
    _stopped: bool = False

    def edit(self, file: TextFile) -> None:
        """Let the model change one file, show the change, and ask. A refusal is one line, and ends this file only."""
        if self._stopped:
            return None
        change = Change(file)
        self._changes.append(change)
        try:
            self._generate(change)
        except RestLocalError as error:
            if isinstance(error, PromptTooLong):
                cause = str(error).partition(";")[0]
                error = EditRefused(file.path, cause, "give a smaller file, or raise `n_ctx`")
            return self._refuse(change, error)
        if not self.as_json:
            self._show(change)
        if change.content != file.content:
            change.accepted = self._is_accepted(change)
            self.failed |= self.do == SHOW
        return None

    def _generate(self, change: Change) -> None:
        """Let the model answer, and fill in the change. Raises RestLocalError."""
        from rest_local.editing.edit import begin, changed

        file, limit = change.file, self.engine.n_ctx if self.tokens < 0 else self.tokens
        characters = tokens = 0
        with Bar(quiet=self.quiet or self.as_json) as bar:
            stream = begin(self.engine, file, self.instruction, max_tokens=limit, sampling=self.sampling)
            for piece in stream:
                characters, tokens = characters + len(piece.text), tokens + len(piece.tokens)
                bar.show(printable(file.path.name), characters, max(len(file.text), 1), f"{tokens} tokens")
        change.result = stream.result
        change.speedup = stream.result.speedup
        change.content = changed(file, stream)

    def _refuse(self, change: Change, error: RestLocalError) -> None:
        self.failed = True
        text = "" if change.result is None else change.result.text
        kept = keep_answer(change.file.path, text) if self.keeps and text.strip() else None
        change.answer_file = None if kept is None else str(kept)
        change.error = fail(error, "" if kept is None else f"; the answer is in {kept}")

    def _show(self, change: Change) -> None:
        diff = change.diff()
        if sys.stdout.isatty():
            for line in diff:
                click.echo(coloured(line))
        else:
            click.echo("".join(diff).encode("utf-8"), nl=False)
        if not self.quiet and change.result is not None:
            added, removed = (sum(line.startswith(sign) for line in diff[2:]) for sign in "+-")
            what = f"+{added} -{removed}" if diff else "no change"
            say(f"{change.file.path}: {what}, {line_of(self.engine, change.result)}")

    def _is_accepted(self, change: Change) -> bool:
        if self.do != ASK:
            return self.do == WRITE
        answers = {"y": "[y]es", "n": "[n]o", "a": "[a]ll", "q": "[q]uit"}
        answer = click.prompt(
            f"Write {printable(str(change.file.path))}? {' '.join(answers.values())}",
            type=click.Choice(list(answers), case_sensitive=False),
            default="n",
            show_choices=False,
        )
        self._stopped = answer == "q"
        if answer == "a":
            self.do = WRITE
        return answer in ("y", "a")

    def write(self) -> None:
        """Write the accepted changes, and say how many others there are."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Writing takes milliseconds and must be all or nothing.
        try:
            for change in self._changes:
                if change.accepted:
                    self._write(change)
        finally:
            signal.signal(signal.SIGINT, before)
        for change in self._changes if self.as_json else ():
            click.echo(change.to_json())
        waiting = sum(change.content not in (None, change.file.content) for change in self._changes)
        if waiting and self.do == SHOW:
            say(f"{counted(waiting, 'file')} would change; nothing was written, --yes writes")

    def _write(self, change: Change) -> None:
        file, content = change.file, change.content
        assert content is not None, "it was accepted"
        try:
            if not file.is_unchanged():
                raise EditRefused(file.path, "changed on the disk meanwhile", "edit it again")
            write_whole(file.target, content)
            change.written = True
        except RestLocalError as error:
            self._refuse(change, error)


def keep_answer(path: Path, text: str) -> Path | None:
    """Keep a refused answer in a temporary file for this user alone. Warn and return None if that fails."""
    from tempfile import NamedTemporaryFile

    name = re.sub(r"[^\w.-]+", "-", path.name)[:40]
    try:
        with NamedTemporaryFile("w", prefix="rest-local-", suffix=f"-{name}.md", delete=False, encoding="utf8") as file:
            file.write(text)
    except OSError as error:
        warn(f"the answer is not kept: {error.filename or 'temporary folder'}: {error.strerror}")
        return None
    return Path(file.name)
