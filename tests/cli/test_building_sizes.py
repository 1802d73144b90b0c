"""`--memory` and `--jobs` of a build."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rest_local.cli.main import cli
from rest_local.paths import demo_model

BUILD = ("index", "build", "-m", str(demo_model()), "--json")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.py").write_text("".join(f"def f{number}_{i}():\n    return {i}\n" for i in range(50)))
    return folder


def test_too_little_memory_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [*BUILD, "--memory=600M", "--jobs=2", str(source)])
    assert done.exit_code != 0
    assert "memory of 300 MB for each process: at least" in str(done.exception or done.output)
    assert not (tmp_path / "home").exists()
