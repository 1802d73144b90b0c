"""Test rest-local with a version of llama-cpp-python, and keep the table of what was tested.

    python scripts/compatibility.py 0.3.36                       # a version; compiles llama.cpp, some minutes
    python scripts/compatibility.py newest --junit build/weekly  # what .ci/weekly runs
    python scripts/compatibility.py --write                      # docs/COMPATIBILITY.md from docs/compatibility.json

- A virtual environment is made, in which that version is installed, and the libraries of this one are used besides.
- First the names are compared (`rest_local.llama.needed`): what is gone is named without a test.
- Then the tests that reach llama.cpp run with tiny models: rooms `llama` and `kv_cache`, and engines of `decoding`.
- The result replaces the row of this version in docs/compatibility.json, unless `--no-record` is given.
- Exit code 1 where a name is gone or a test failed; the summary says which.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/compatibility.json"
PAGE = ROOT / "docs/COMPATIBILITY.md"
LIBRARY = "llama-cpp-python"
TESTS = (
    "tests/llama", "tests/kv_cache", "tests/decoding/test_engine.py", "tests/decoding/test_generation.py",
    "tests/decoding/test_architectures.py", "tests/decoding/test_heads_exact.py", "tests/decoding/test_saved_cells.py",
    "tests/decoding/test_images.py", "tests/cli/test_end_to_end.py",
)  # fmt: skip
WORKERS = ("-n", "1", "--dist", "loadfile")  # A process that crashes is then a test that failed.
INSTALL_SECONDS = 2 * 3600
TEST_SECONDS = 3600
LOOK = """
import json
import llama_cpp
from llama_cpp import llama_cpp as bindings, mtmd_cpp
from rest_local.llama import needed
lacks = [*needed.lacking(bindings), *needed.lacking_for_images(mtmd_cpp)]
llama = getattr(bindings, "llama_version", lambda: b"")().decode()
print(json.dumps({"version": llama_cpp.__version__, "llama_cpp": llama, "lacks": lacks}))
"""
HEAD = """\
# Compatibility

Versions of llama-cpp-python that the tests ran with, one run in each row. `rest-local doctor` names what an installed
version lacks, and a version that lacks something is refused.

| llama-cpp-python | llama.cpp | Python | system | tested on | passed | failed | skipped | |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """\
`scripts/compatibility.py` writes this page from docs/compatibility.json, which lists the tests of each run and those
that failed. `.ci/weekly` tests the newest version every week.
"""


@dataclass
class Outcome:
    """The result of a version. `failed` has the names of tests, each with the first line of why.

    `lacks` has the names that are gone. `error` says why there was nothing to test, or is empty.
    """

    version: str
    llama_cpp: str = ""
    python: str = ""
    system: str = ""
    date: str = ""
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    error: str = ""
    tests: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return bool(self.passed) and not (self.failed or self.lacks or self.error)


def read_junit(text: str) -> tuple[int, int, dict[str, str]]:
    """Return how many tests passed and were skipped, and those that failed with the first line of why.

    Raises ValueError if it is no report of pytest.
    """
    try:
        cases = list(ElementTree.fromstring(text).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(f"no report of pytest: {error}") from None
    passed = skipped = 0
    failed: dict[str, str] = {}
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
        problems = [*case.findall("failure"), *case.findall("error")]
        if problems:
            message = problems[0].get("message") or problems[0].text or "failed"
            failed[name] = message.strip().splitlines()[0].replace(f"{ROOT}{os.sep}", "")[:200]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def summary(outcome: Outcome) -> Iterator[str]:
    """Yield the lines, in Markdown, of what a version broke."""
    yield f"## {LIBRARY} {outcome.version}: {'works' if outcome.works else 'does not work'}"
    yield ""
    if outcome.error:
        yield f"Nothing was tested: {outcome.error}"
        return
    if outcome.lacks:
        yield f"{len(outcome.lacks)} names are gone that rest-local uses:"
        yield ""
        yield from (f"- `{name}`" for name in outcome.lacks)
        yield ""
    yield f"{outcome.passed} tests passed, {len(outcome.failed)} failed, {outcome.skipped} were skipped."
    if outcome.failed:
        yield ""
        yield from (f"- `{name}`{times}: {why}" for name, times, why in grouped(outcome.failed))


def grouped(failed: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each test that failed once: its name, how many of its cases failed, and why the first one did."""
    cases: dict[str, list[str]] = {}
    for name, why in failed.items():
        cases.setdefault(name.partition("[")[0], []).append(why)
    for name, reasons in cases.items():
        yield name, f" ({len(reasons)} cases)" if len(reasons) > 1 else "", reasons[0]


def environment(folder: Path, version: str) -> Path:
    """Make a virtual environment with that version, and return its Python. Raises OSError, CalledProcessError.

    Its other libraries are those of the Python that runs this."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    wanted = LIBRARY if version == "newest" else f"{LIBRARY}=={version}"
    pip = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--upgrade", wanted]
    command = [sys.executable, str(ROOT / "scripts/compiler_check.py"), sys.executable, *pip]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (Path(site) / "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(here)), "utf-8")
    return python


def examine(python: Path, version: str, junit: Path, tests: Sequence[str] = TESTS) -> Outcome:
    """Look at the names and run the tests with that Python."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    looked = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, env=variables, check=False)
    if looked.returncode:
        lines = looked.stderr.strip().splitlines() or ["no output"]
        return stamped(Outcome(version, error=f"it cannot be loaded: {lines[-1]}"))
    outcome = stamped(Outcome(**json.loads(looked.stdout), tests=list(tests)))
    if outcome.lacks:  # Nothing else of this package can be imported.
        return outcome
    report = junit / f"{LIBRARY}-{outcome.version}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *WORKERS, f"--junit-xml={report}", *tests]
    try:
        subprocess.run([python, *pytest], cwd=ROOT, env=variables, timeout=TEST_SECONDS, check=False)
        outcome.passed, outcome.skipped, outcome.failed = read_junit(report.read_text("utf-8"))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # a crash of the process leaves no report
        outcome.error = f"the tests did not end: {error}"
    return outcome


def stamped(outcome: Outcome) -> Outcome:
    outcome.python, outcome.date = platform.python_version(), datetime.now(timezone.utc).date().isoformat()
    outcome.system = f"{platform.system()} {platform.machine()}"
    return outcome


def order(version: str) -> tuple[int, ...]:
    """Return a key that sorts versions such as 0.3.9 and 0.3.36."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def record(outcome: Outcome, table: Path = TABLE) -> None:
    """Put the outcome into the table, in the place of that of the same version, Python and system."""
    rows = json.loads(table.read_text("utf-8")) if table.exists() else []
    key = ("version", "python", "system")
    new = asdict(outcome)
    rows = [row for row in rows if any(row[name] != new[name] for name in key)]
    rows = sorted([*rows, new], key=lambda row: (order(row["version"]), order(row["python"]), row["system"]))
    table.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/COMPATIBILITY.md, made of the rows of docs/compatibility.json."""
    lines = [*HEAD.splitlines()]
    for row in rows:
        outcome = Outcome(**row)
        word = "works" if outcome.works else outcome.error or f"lacks {len(outcome.lacks)} names" * bool(outcome.lacks)
        lines.append(
            f"| {outcome.version} | {outcome.llama_cpp or 'unknown'} | {outcome.python} | {outcome.system} "
            f"| {outcome.date} | {outcome.passed} | {len(outcome.failed)} | {outcome.skipped} "
            f"| {word or 'fails'} |"
        )
    lines += ["", *TAIL.splitlines(), ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test a version, or write the page. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Test rest-local with a version of llama-cpp-python.")
    parser.add_argument("version", nargs="?", help="such as 0.3.36, or newest")
    parser.add_argument("--python", type=Path, help="a Python that has it, instead of a new environment")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files and folders of tests")
    parser.add_argument("--junit", type=Path, default=ROOT / "build/compatibility", help="folder of pytest's reports")
    parser.add_argument("--summary", type=Path, help="file to which the summary is added")
    parser.add_argument("--no-record", action="store_true", help="leave docs/compatibility.json as it is")
    parser.add_argument("--write", action="store_true", help="only write docs/COMPATIBILITY.md")
    chosen = parser.parse_args(arguments)
    outcome = None
    if not chosen.write:
        if not chosen.version:
            parser.error("name a version, or `newest`")
        with tempfile.TemporaryDirectory(prefix="rest-local-compatibility-") as folder:
            try:
                python = chosen.python or environment(Path(folder), chosen.version)
            except (OSError, subprocess.SubprocessError) as error:
                outcome = stamped(Outcome(chosen.version, error=f"it cannot be installed: {error}"))
            else:
                outcome = examine(python, chosen.version, chosen.junit, chosen.tests)
        lines = "\n".join(summary(outcome)) + "\n"
        print(lines)
        if chosen.summary:
            with chosen.summary.open("a", encoding="utf-8") as file:
                file.write(lines)
        if not chosen.no_record:
            record(outcome)
    if chosen.write or not chosen.no_record:
        PAGE.write_text(page(json.loads(TABLE.read_text("utf-8"))), "utf-8")
    return 0 if outcome is None or outcome.works else 1


if __name__ == "__main__":
    sys.exit(main())
