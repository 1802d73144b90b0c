"""docs/BENCHMARKS.md is what `bench report` makes of the committed results.

rest-local bench report docs/results --markdown docs/BENCHMARKS.md
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rest_local.bench.report import figures
from rest_local.bench.report.markdown import document
from rest_local.bench.report.writing import make, prefix

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
LARGEST = 100_000  # bytes of a figure


@pytest.fixture(scope="module")
def made() -> tuple[str, dict[str, str]]:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    text, files = document(make(RESULTS), prefix(DOCS / "BENCHMARKS.md", RESULTS))
    return text, dict(files)


def test_the_document_is_made_from_the_committed_results(made: tuple[str, dict[str, str]]) -> None:
    assert (DOCS / "BENCHMARKS.md").read_text("utf-8") == made[0]


def test_every_result_is_shown() -> None:
    assert make(RESULTS).left_out == []


def test_the_figures_are_those_of_the_results(made: tuple[str, dict[str, str]]) -> None:
    assert {path.name for path in RESULTS.glob("*.svg")} == set(made[1])
    for name, content in made[1].items():
        committed = (RESULTS / name).read_text("utf-8")
        assert ElementTree.fromstring(committed).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(committed) < LARGEST
        recorded = re.match(r"<!-- (matplotlib [\w.+]+) -->", committed)
        assert recorded
        if recorded[1] == figures.version():
            assert committed == content, f"{name} was made from other results"


def test_results_name_no_folder_of_the_machine_that_measured_them() -> None:
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'["\s]/(work|home|root|tmp|Users)/', path.read_text("utf-8")), path.name
