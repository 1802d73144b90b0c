"""Runs the parts of the suite, each as a process of its own: one that crashes or hangs does not lose the others."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from rest_local.bench.suite.parts import Part
from rest_local.bench.suite.record import FAILED, LEFT_OUT, MEASURED, Outcome, Record, why_not
from rest_local.errors import ResultInvalid

LONGEST_S = 3600.0  # of a part: four times what the longest takes on 2 cores
PATIENCE_S = 10.0  # for a process to end by itself after Ctrl-C, which it has got as well
PROGRAM = (sys.executable, "-m", "rest_local")
_ERROR = re.compile(r"^rest-local: error: (.*)$", re.MULTILINE)


def check(parts: Sequence[Part], folder: Path, record: Record, *, quick: bool, again: bool) -> None:
    """Look at the results that are there before anything is measured. With `again`, those that do not belong to this
    run are removed. Raises ResultInvalid, OSError.
    """
    for part in parts:
        reason = why_not(part, folder, record, quick=quick)
        if reason is None:
            continue
        if not again:
            raise ResultInvalid(folder / part.file, f"{reason}; `again` measures it anew, or give another folder")
        (folder / part.file).unlink()
        (folder / part.journal).unlink(missing_ok=True)


def run(
    parts: Sequence[Part],
    folder: Path,
    record: Record,
    *,
    quick: bool,
    begin: Callable[[Part], None] = lambda part: None,
    done: Callable[[Part, Outcome, bool], None] = lambda part, outcome, kept: None,
    program: Sequence[str] = PROGRAM,
    longest_s: float = LONGEST_S,
) -> list[Outcome]:
    """Measure what the folder lacks, and record it. Returns the outcomes in the order of the parts. Raises OSError if
    the folder cannot be written; KeyboardInterrupt, with everything that is finished recorded.

    begin   gets a part before it is measured
    done    gets a part, its outcome, and whether its result was there before
    """
    record.keep([part.name for part in parts])
    outcomes = []
    for part in parts:
        known = record.outcomes.get(part.name)
        kept = (folder / part.file).exists()
        if kept:
            outcome = known if known and known.state == MEASURED else Outcome(part.file, MEASURED, options=part.options)
        elif part.missing:
            outcome = Outcome(part.file, LEFT_OUT, part.missing)
        else:
            begin(part)
            outcome = _measured(part, [*program, *part.command(folder, quick=quick)], folder, longest_s)
        record.put(part.name, outcome)
        done(part, outcome, kept)
        outcomes.append(outcome)
    return outcomes


def _measured(part: Part, command: Sequence[str], folder: Path, longest_s: float) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        code: int | None = None
        try:
            code = process.wait(longest_s)
        except subprocess.TimeoutExpired:
            _end(process)
        finally:
            _wait(process)  # it got Ctrl-C as well
            _end(process)
        errors.seek(0)
        state, reason = _ended(code, errors, longest_s)
    if state == MEASURED and not (folder / part.file).exists():
        state, reason = FAILED, f"ended without writing {part.file}"
    return Outcome(part.file, state, reason, round(time.monotonic() - begun, 1), part.options)


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process ends by itself in time."""
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then kill it. Does nothing if it has ended."""
    for ask in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is not None:
            return
        try:
            process.send_signal(ask)
        except ValueError:  # Windows has no SIGINT for one process
            continue
        if _wait(process):
            return
    process.kill()
    process.wait()


def _ended(code: int | None, errors: IO[bytes], longest_s: float) -> tuple[str, str]:
    """State and reason. What the program refuses is left out; anything else that goes wrong has failed."""
    if code == 0:
        return MEASURED, ""
    text = errors.read().decode("utf-8", "replace").strip()
    if code is None:
        return FAILED, f"took longer than {longest_s / 60:.3g} minutes and was stopped"
    if code < 0:
        return FAILED, f"ended by signal {-code}"
    found = _ERROR.findall(text)
    if found and code == 1:
        return LEFT_OUT, found[-1]
    last = text.splitlines()[-1] if text else "it said nothing"
    return FAILED, f"exit code {code}: {found[-1] if found else last}"
