"""`edit`, `batch`, `index` and `generate` with a real model."""

import random
import re
from pathlib import Path

import pytest
from support.batches import kill_and_go_on
from support.command import Call

from rest_local.cli import edit

GREETING = 'def greet(name):\n    print("Hello, " + name)\n\n\ngreet("Ann")\n'
LETTER = "Dear Ann,\n\nThank you for the flowers.\n\nYours,\nBob\n"
# A package, and the beginning of a function in it.
MODULE = '''"""Opening hours."""


def opening_hours(day, holidays):
    """Return the opening hours of the shop on a day, as a pair of numbers, or None if it is closed.

    Days are numbers from 0 (Monday) to 6 (Sunday).
    """
    if day in holidays or day == 6:
        return None
    if day == 5:
        return (10, 14)
    return (9, 18)


def is_open(day, hour, holidays):
    """Return True if the shop is open on a day at an hour."""
    hours = opening_hours(day, holidays)
    if hours is None:
        return False
    begin, end = hours
    return begin <= hour < end
'''


def test_edits_are_declined_written_and_refused(
    call: Call, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user at the terminal declines the first change and takes the second. The third answer never ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edit, "_at_terminal", lambda: True)
    declined, written, refused = files = [Path("greet.py"), Path("hello.py"), Path("letter.txt")]
    for path, text in zip(files, (GREETING, GREETING, LETTER), strict=True):
        path.write_text(text)
    given = ("-m", str(smollm2), "--no-history", "-n", "90")
    done = call("edit", *map(str, files), "Replace Ann with Bob.", *given, stdin=b"n\ny\n")
    assert declined.read_text() == GREETING
    assert refused.read_text() == LETTER
    assert 'greet("Bob")' in written.read_text()
    assert "Ann" not in written.read_text()
    assert '-greet("Ann")\n' in done.out
    assert '+greet("Bob")\n' in done.out
    assert "letter.txt: the answer was cut off after 90 tokens; nothing was written" in done.err
    assert done.code == 1


def test_a_batch_that_was_killed_answers_each_request_once(smollm2: Path, tmp_path: Path) -> None:
    options = ("-m", str(smollm2), "-c", "256", "-t", "1", "--no-history")
    advanced = kill_and_go_on(tmp_path, kills=1, requests=12, random=random.Random(1), options=options)
    assert advanced == 1, "it was killed after its first answer"


def test_generate_drafts_from_an_indexed_package_and_says_so(
    call: Call, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text('"""A shop."""\n')
    (package / "hours.py").write_text(MODULE)
    built = call("index", "build", str(package), "-o", str(tmp_path / "shopcode"), "-m", str(smollm2))
    assert built.code == 0, built.err
    prompt = MODULE[: MODULE.index("    if day == 5")]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # Then the line about the speed is printed.
    given = ("-m", str(smollm2), "-d", str(tmp_path / "shopcode"), "--no-history", "-n", "32", "--temp", "0")
    done = call("generate", prompt, *given)
    assert done.code == 0
    assert re.search(r"[1-9]\d*% from .*shopcode", done.err), done.err


def test_a_home_that_cannot_be_written_costs_warnings_only(
    call: Call, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.write_text("a file, so that nobody can make a directory below it, not even root")
    for name in ("REST_LOCAL_CACHE", "REST_LOCAL_DATA", "REST_LOCAL_DATASTORES"):
        monkeypatch.setenv(name, str(home / name))
    done = call("generate", "The capital of France is", "-m", str(smollm2), "-n", "4", "--temp", "0")
    assert done.code == 0
    assert done.out.strip()
    warned = [line for line in done.err.splitlines() if "warning" in line]
    assert any("no history is kept" in line for line in warned)
    assert any("the cache directory cannot be used" in line for line in warned)
    assert all("Not a directory" in line for line in warned)
