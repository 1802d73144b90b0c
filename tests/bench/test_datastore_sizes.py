"""`bench datastore-size`: the points, the size that is enough, the slopes, the picture and the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rest_local.bench.recorded import Recorded
from rest_local.bench.size_plot import plot
from rest_local.bench.sizes import Corpus, Point, enough, measure, prefix, slopes
from rest_local.cli.main import run
from rest_local.retrieval.changing.pruning import Target

FLAT = "assumed-flat-to-8"


def corpus() -> tuple[Corpus, list[Recorded]]:
    """Documents of which each answer repeats one."""
    random = np.random.default_rng(1)
    documents = [random.integers(0, 200, 60, np.int32) for _ in range(24)]
    tested = [Recorded(str(n), [1], document[10:50].tolist()) for n, document in enumerate(documents)]
    return Corpus(documents, 256), tested


def point(tokens: int, speedup: float) -> Point:
    return Point(str(tokens), tokens / 800, [tokens], [7 * tokens], [1.5], {FLAT: [speedup]})


def test_more_documents_give_more_accepted_tokens() -> None:
    documents, tested = corpus()
    report = measure(documents, tested, curves=[FLAT], draws=2, shares=(0.25, 1.0), targets=[Target(size=3000)])
    none, quarter, whole = report["points"]
    assert (none["tokens"], quarter["tokens"], whole["tokens"]) == (0, 6 * 61, 24 * 61)
    assert none["mat"]["mean"] < quarter["mat"]["mean"] < whole["mat"]["mean"]
    assert (quarter["draws"], whole["draws"]) == (2, 1)
    assert quarter["mat"]["least"] <= quarter["mat"]["mean"] <= quarter["mat"]["greatest"]
    (pruned,) = report["pruned"]
    assert pruned["tokens"] <= 3000 / 6
    assert report["enough"][FLAT]["tokens"] == whole["tokens"]
    assert all(row["lookup_us"] > 0 for row in (quarter, whole, pruned))
    (slope,) = report["slopes"][FLAT]
    gain = whole["speedup"][FLAT]["mean"] - quarter["speedup"][FLAT]["mean"]
    assert slope == {"tokens": whole["tokens"], "slope": pytest.approx(gain / 2, abs=1e-3)}
    assert json.loads(json.dumps(report)) == report


def test_a_report_is_repeatable() -> None:
    documents, tested = corpus()
    reports = [measure(documents, tested[:5], curves=[FLAT], draws=1, shares=(0.5,), targets=[]) for _ in range(2)]
    for report in reports:
        for row in report["points"]:
            row.pop("lookup_us")
    assert reports[0] == reports[1]


def test_enough_is_the_smallest_size_with_most_of_the_gain() -> None:
    points = [point(0, 1.0), point(100, 1.1), point(200, 1.191), point(400, 1.2), point(800, 1.199)]
    found = enough(points, FLAT)
    assert found == {"share": 0.25, "tokens": 200, "bytes": 1400, "gain": 0.955}
    assert [row["slope"] for row in slopes(points, FLAT)] == [0.091, 0.009, -0.001]
    assert enough([point(0, 1.0), point(100, 0.99)], FLAT) is None


def test_a_prefix_comes_closest_to_its_share() -> None:
    sizes = [10, 50, 10, 30]
    documents = Corpus([np.zeros(size, np.int32) for size in sizes], 100)
    assert prefix(documents, [0, 1, 2, 3], 0.01) == [0]
    assert prefix(documents, [0, 1, 2, 3], 0.6) == [0, 1]
    assert prefix(documents, [3, 2, 1, 0], 0.4) == [3, 2]
    assert prefix(documents, [0, 1, 2, 3], 1.0) == [0, 1, 2, 3]


def test_the_plot_is_svg_and_shows_every_point() -> None:
    documents, tested = corpus()
    report = measure(documents, tested[:5], curves=[FLAT], draws=2, shares=(0.25, 1.0), targets=[Target(size=3000)])
    picture = plot(report)
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    names = [element.tag.rpartition("}")[2] for element in root]
    assert names.count("circle") == 2 * (2 + 1)  # in each panel the sizes and the legend
    assert FLAT in picture
    assert "nan" not in picture
    assert "inf" not in picture
    with pytest.raises(ValueError, match="no sizes"):
        plot({**report, "points": report["points"][:1]})


def test_the_command_measures_text_and_draws_a_plot(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} {copy} {number}\n" * 3)
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n".join(json.dumps({"instruction": f"q{n}", "output": copy}) for n in range(4)))
    picture = tmp_path / "plot.svg"
    model = str(tiny_model("llama"))
    command = [
        "bench",
        "datastore-size",
        str(answers),
        "-m",
        model,
        "--curve",
        FLAT,
        "--draws",
        "1",
        "--prune",
        "seen:2",
    ]
    assert run([*command, "--text", str(tmp_path), "--plot", str(picture), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answers"] == 4
    assert report["documents"] == 4
    assert [row["label"] for row in report["pruned"]] == ["pruned seen:2"]
    assert picture.read_text().startswith("<svg")
    assert run([*command, "--history", "2"]) == 0
    out = capsys.readouterr().out
    assert "of the gain" in out
    assert "pruned seen:2" in out


def test_the_command_refuses_what_it_cannot_measure(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"instruction": "q", "output": "some text that is long enough"}))
    command = ["bench", "datastore-size", "-m", str(tiny_model("llama"))]
    for arguments, message in (
        ([], "nothing to replay"),
        ([str(answers)], "no documents"),
        ([str(answers), "--history", "1"], "there are 1 answers"),
        ([str(answers), "--prune", "2"], "seen:2"),
        ([str(answers), "-d", str(tmp_path / "none")], "none"),
    ):
        assert run([*command, *arguments]) != 0
        assert message in capsys.readouterr().err
