"""The wheel: what is in it, what its metadata says, and that `scripts/dist.py` sees what is wrong with one."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import tomlkit
from support.scripts import load_script

import rest_local

ROOT = Path(__file__).parents[1]
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git tracks; no checkout")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "scripts" / "dist.py", "dist")


@pytest.fixture(scope="module")
def wheel(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    (path,) = script.build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel")
    assert isinstance(path, Path)
    return path


def added() -> dict[str, str]:
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text("utf-8")).unwrap()
    return dict(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])


def names_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/METADATA"))).decode()


@needs_git
def test_the_wheel_holds_what_git_tracks_of_the_package_and_nothing_else(script: ModuleType, wheel: Path) -> None:
    known = {name for name in script.tracked() if (ROOT / name).exists()}
    problems = [problem for problem in script.wheel_problems(names_of(wheel), known, added()) if "track" not in problem]
    assert problems == [], "files that are new and not added yet are no fault here"


def test_the_wheel_is_small_and_typed_and_has_no_model(script: ModuleType, wheel: Path) -> None:
    names = names_of(wheel)
    assert wheel.stat().st_size < script.MOST_BYTES
    assert {"rest_local/py.typed", "rest_local/data/recipes/python.toml"} <= {*names}
    assert not [name for name in names if name.endswith(".gguf")]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/", "scripts/"))]


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "unpacked")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rest_local.cli.main import run\n"
        "sys.exit(run(['generate', '-n', '4', '--no-history', 'def main():']))\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(tmp_path / "unpacked")]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_metadata_is_complete(script: ModuleType, wheel: Path) -> None:
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text("utf-8")).unwrap()["project"]
    text = metadata_of(wheel)
    assert list(script.metadata_problems(text, project, rest_local.__version__)) == []
    wrong = text.replace("License-Expression: MIT", "License-Expression: X").replace("Provides-Extra: ray\n", "")
    problems = "; ".join(script.metadata_problems(wrong.replace("Keywords", "Words"), project, "9.9"))
    for what in ("rest_local says 9.9", "License-Expression is X", "the extras are", "Keywords is missing"):
        assert what in problems


def test_twine_accepts_the_wheel(wheel: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


INFO = "rest_local-1.dist-info/"
GOOD = [
    "rest_local/a.py", "rest_local/py.typed", "rest_local/data/recipes/a.toml",
    f"{INFO}METADATA", f"{INFO}entry_points.txt", f"{INFO}licenses/LICENSE",
]  # fmt: skip
KNOWN = {"rest_local/a.py", "rest_local/py.typed", "datastore/a.toml"}
ADDED = {"datastore/a.toml": "rest_local/data/recipes/a.toml"}


def test_a_file_too_many_or_too_few_in_the_wheel_is_a_problem(script: ModuleType) -> None:
    assert list(script.wheel_problems(GOOD, KNOWN, ADDED)) == []
    for name in GOOD:
        problems = script.wheel_problems([other for other in GOOD if other != name], KNOWN, ADDED)
        assert any(Path(name).name in problem and "not in the wheel" in problem for problem in problems), name
    for name in ("tests/test_a.py", "rest_local/notes.txt", "rest_local/__pycache__/a.pyc"):
        assert any(problem.startswith(name) for problem in script.wheel_problems([*GOOD, name], KNOWN, ADDED)), name


def test_a_source_distribution_holds_what_git_tracks(script: ModuleType) -> None:
    known = {"rest_local/a.py", "tests/test_a.py", "pyproject.toml"}
    assert list(script.sdist_problems([*known, "PKG-INFO"], known)) == []
    problems = list(script.sdist_problems(["rest_local/a.py", "work/secret"], known))
    assert problems == [
        "work/secret is in the source distribution, and git does not track it",
        "tests/test_a.py is not in the source distribution",
    ]


def test_builds_that_differ_are_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(source: Path, output: Path, *kinds: str) -> list[Path]:
        output.mkdir(exist_ok=True)
        names = [f"a{kind}" for kind in kinds] or ["a--sdist", "a--wheel"]
        for name in names:
            (output / name).write_text("same" if name == "a--sdist" else str(output), "utf-8")
        return [output / name for name in names]

    monkeypatch.setattr(script, "build", build)
    assert script.main(["--output", str(tmp_path / "dist")]) == 1
    assert capsys.readouterr().err == "dist: a--wheel is not reproducible: two builds differ\n"
    assert not (tmp_path / "dist").exists()


def test_a_command_that_fails_is_refused_with_its_output(script: ModuleType) -> None:
    with pytest.raises(script.Refused, match="exit 3: what is wrong"):
        script.run([sys.executable, "-c", "import sys; print('what is wrong'); sys.exit(3)"])
