"""`--memory` and `--jobs` of a build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rest_local.cli.main import cli
from rest_local.cli.options import size_of
from rest_local.paths import demo_model
from rest_local.retrieval.building import indexing

BUILD = ("index", "build", "-m", str(demo_model()), "--json")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.py").write_text("".join(f"def f{number}_{i}():\n    return {i}\n" for i in range(50)))
    return folder


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2 << 30), ("1.5g", 3 << 29), ("1500M", 1500 << 20), ("2GB", 2 << 30), ("4096", 4096), (" 3T ", 3 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_of(text) == size


def test_too_little_memory_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [*BUILD, "--memory=600M", "--jobs=2", str(source)])
    assert done.exit_code != 0
    assert "memory of 300 MB for each process: at least" in str(done.exception or done.output)
    assert not (tmp_path / "home").exists()


def test_memory_and_jobs_reach_the_build(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []

    def plan(walk: object, memory: int, vocabulary: object, least: int) -> object:
        given.append((memory, least))
        return original(walk, memory, vocabulary, least)  # type: ignore[arg-type]

    original = indexing.plan
    monkeypatch.setattr(indexing, "plan", plan)
    done = CliRunner().invoke(cli, [*BUILD, "--memory=3G", "--jobs=3", str(source)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert given == [(1 << 30, 3)]
    assert json.loads(done.stdout)["documents"] == 6
