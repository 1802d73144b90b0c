"""Build the source distribution and the wheel, and check both before anything is published: `make dist`.

    python scripts/dist.py                       # with the libraries of this environment, a minute
    python scripts/dist.py --full                # with all libraries installed anew; llama.cpp may be compiled
    python scripts/dist.py --full --python python3.13 --extras ray,parquet

- Everything is built twice: the wheel from the source distribution, and from the checkout. Both have the same bytes.
  Times in the archives are those that hatchling fixes, so SOURCE_DATE_EPOCH is not used; a wheel that is made of the
  source distribution later equals this one, with the same versions of hatchling and zlib.
- The files are compared with what git tracks: nothing that lies around in the checkout gets in.
- The wheel is installed into a clean environment and used from an empty folder, with nothing of the checkout in reach.
- The first check that fails ends the script with one line and exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2_500_000
LICENCE = "licenses/LICENSE"
STRAY = ("__pycache__", ".pyc", "/work/", ".so", ".orig")
COMMAND_SECONDS = 300
INSTALL_SECONDS = 3600  # llama.cpp may be compiled.


class Refused(Exception):
    """A check failed, and the message says which."""


def run(
    command: Sequence[object], seconds: float = COMMAND_SECONDS, *, cwd: Path = ROOT,
    env: dict[str, str] | None = None,
) -> str:  # fmt: skip
    """Run a command and return its standard output. Raises Refused with the end of its output."""
    words = list(map(str, command))
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd, env=env
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        raise Refused(f"{' '.join(words)}: exit {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return done.stdout


def build(source: Path, output: Path, *kinds: str) -> list[Path]:
    """Build `--sdist`, `--wheel`, or without kinds the source distribution and of that the wheel. Returns the files."""
    output.mkdir(parents=True, exist_ok=True)
    before = {*output.iterdir()}
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", output, *kinds, source]
    run(command, env=environment)
    return sorted({*output.iterdir()} - before, key=lambda path: path.suffix)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tracked(source: Path = ROOT) -> set[str]:
    """Return the files that git tracks, by their names in the checkout."""
    return set(run(["git", "-C", source, "ls-files", "-z"]).split("\0")) - {""}


def sdist_problems(names: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yield what is wrong with the files of a source distribution. `names`: without its folder."""
    for name in sorted({*names} - known - {"PKG-INFO"}):
        yield f"{name} is in the source distribution, and git does not track it"
    for name in sorted(name for name in known if name.startswith(("rest_local/", "tests/", "scripts/"))):
        if name not in names:
            yield f"{name} is not in the source distribution"


def wheel_problems(names: Sequence[str], known: set[str], project: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with the files of a wheel. `project`: checkout name to wheel name of what is added."""
    expected = {name for name in known if name.startswith("rest_local/")} | {*project.values()}
    package = {name for name in names if name.startswith("rest_local/")}
    for name in sorted(expected - package):
        yield f"{name} is not in the wheel"
    for name in sorted(package - expected):
        yield f"{name} is in the wheel, and git does not track it"
    for name in sorted({*names} - package):
        if ".dist-info/" not in name:
            yield f"{name} is in the wheel, outside the package"
    yield from (f"{name} is in the wheel" for name in names if any(part in name for part in STRAY))
    for wanted in (LICENCE, "entry_points.txt", "METADATA"):
        if not any(name.endswith(f".dist-info/{wanted}") for name in names):
            yield f"{wanted} is not in the wheel"
    if "rest_local/py.typed" not in names:
        yield "rest_local/py.typed is not in the wheel"


def metadata_problems(text: str, project: dict[str, Any], version: str) -> Iterator[str]:
    """Yield what is wrong with the METADATA of a wheel, beyond what `twine check` looks at."""
    fields = HeaderParser().parsestr(text)
    if fields["Version"] != version:
        yield f"the version is {fields['Version']}, and rest_local says {version}"
    for field, value in (("License-Expression", project["license"]), ("Description-Content-Type", "text/markdown")):
        if fields[field] != value:
            yield f"{field} is {fields[field]}, not {value}"
    if {*fields.get_all("Provides-Extra", [])} != {*project["optional-dependencies"]}:
        yield f"the extras are {fields.get_all('Provides-Extra')}"
    classifiers = fields.get_all("Classifier", [])
    for minor in range(10, 14):
        if f"Programming Language :: Python :: 3.{minor}" not in classifiers:
            yield f"no classifier names Python 3.{minor}"
    yield from (f"{field} is missing" for field in ("Keywords", "Summary", "Requires-Python") if not fields[field])


def check_archives(sdist: Path, wheel: Path) -> None:
    """Compare the files and the metadata with the checkout. Raises Refused with all that is wrong."""
    whole = tomlkit.parse((ROOT / "pyproject.toml").read_text("utf-8")).unwrap()
    added = whole["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    with tarfile.open(sdist) as archive:
        inside = [member.name.partition("/")[2] for member in archive if member.isfile()]
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        text = file.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    known = tracked()
    problems = [
        *sdist_problems(inside, known),
        *wheel_problems(names, known, added),
        *metadata_problems(text, whole["project"], version()),
    ]
    if wheel.stat().st_size > MOST_BYTES:
        problems.append(f"the wheel has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    if problems:
        raise Refused("; ".join(problems))


def version() -> str:
    """Return the version that the code says. The package is not imported, because another one may be installed."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "rest_local/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found
    return found[1]


def environment_of(folder: Path, wheel: Path, python: str, full: bool, extras: str) -> Path:
    """Make a clean virtual environment with the wheel, and return its folder of commands.

    Not `full`: nothing else is installed, and the libraries are those of the Python that runs this.
    """
    run([python, "-m", "venv", *([] if full else ["--without-pip"]), folder])
    commands = folder / ("Scripts" if os.name == "nt" else "bin")
    if full:
        what = f"{wheel}[{extras}]" if extras else str(wheel)
        run([commands / "python", "-m", "pip", "install", "--quiet", what], INSTALL_SECONDS)
        return commands
    pip = [sys.executable, "-m", "pip", "--python", commands / "python"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel])
    site = run([commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (Path(site) / "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(here)), "utf-8")
    return commands


def use(commands: Path, folder: Path) -> None:
    """Run the commands that a user runs first, in an empty folder. Raises Refused."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REST_LOCAL_"))}
    places = {f"REST_LOCAL_{name}": str(folder / name.lower()) for name in ("CACHE", "DATA", "CONFIG", "MODELS")}
    # Threads that wait for each other sleep: on a busy machine a spinning one takes the processor it waits for.
    places["REST_LOCAL_MODEL"] = str(ROOT / "models" / "demo.gguf")  # The wheel has no model.
    environment = {**kept, **places, "HF_HOME": str(folder / "hub"), "GOMP_SPINCOUNT": "0"}

    def call(*words: str | Path, program: str = "rest-local") -> str:
        return run([commands / program, *words], cwd=folder, env=environment)

    def expect(right: bool, what: str) -> None:
        if not right:
            raise Refused(what)

    where = call("-c", "import rest_local; print(rest_local.__file__)", program="python").strip()
    expect(Path(where).is_relative_to(commands.parent), f"rest_local is imported from {where}, not from the wheel")
    expect(version() in call("--version"), "rest-local --version tells another version")
    call("doctor", "--json")
    expect(bool(call("generate", "-n", "8", "def main():").strip()), "generate writes nothing")
    (folder / "text.py").write_text("def area(width, height):\n    return width * height\n", "utf-8")
    expect("1 files" in call("index", "build", "text.py", "-o", "store"), "index build reads no file")
    call("demo", "-n", "16", "--repeats", "1", "--code", folder, "--json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the source distribution and the wheel, and check both.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the files")
    parser.add_argument("--full", action="store_true", help="install all libraries anew")
    parser.add_argument("--python", default=sys.executable, help="Python of the clean environment, with --full")
    parser.add_argument("--extras", default="", help="extras to install, with --full: ray,parquet")
    chosen = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="rest-local-dist-") as name:
            folder = Path(name)
            sdist, wheel = build(ROOT, folder / "first")
            again, direct = *build(ROOT, folder / "second", "--sdist"), *build(ROOT, folder / "second", "--wheel")
            for first, second in ((sdist, again), (wheel, direct)):
                if digest(first) != digest(second):
                    raise Refused(f"{first.name} is not reproducible: two builds differ")
            check_archives(sdist, wheel)
            run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
            commands = environment_of(folder / "environment", wheel, chosen.python, chosen.full, chosen.extras)
            use(commands, folder / "place")
            chosen.output.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                kept = chosen.output / path.name
                kept.write_bytes(path.read_bytes())
                print(f"{digest(kept)}  {kept.name}  {kept.stat().st_size:,} bytes")
    except Refused as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
