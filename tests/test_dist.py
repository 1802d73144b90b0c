"""The wheel has what git tracks of the package, and works without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 2_500_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git tracks; no checkout")
def test_the_wheel_has_what_git_tracks_of_the_package_and_nothing_else(wheel: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "rest_local"]
    known = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert names_of(wheel) == {name for name in known if (ROOT / name).exists()}


def test_the_wheel_is_small_and_typed_and_has_no_model(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_BYTES
    assert "rest_local/py.typed" in names_of(wheel)
    assert not [name for name in names_of(wheel) if name.endswith(".gguf")]


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
