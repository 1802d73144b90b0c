"""The experiments by name. A module is imported when its experiment is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from rest_local.bench.experiments.inputs import Inputs
    from rest_local.bench.report.shapes import Section
    from rest_local.bench.results import Journal, Result

EXPERIMENTS: Mapping[str, str] = {
    "retrieval-quality": "retrieval_quality",
    "tree-verification": "tree_verification",
    "datastore-size": "datastore_size",
    "domains": "domains",
    "own-text": "own_text",
    "retrieval-and-drafter": "retrieval_and_drafter",
    "rest-paper": "rest_paper",
    "arctic": "arctic",
    "respec-parts": "respec_parts",
    "relaxed": "relaxed",
}
"""Names, in the order of the report, and the modules of this folder."""


class Experiment(Protocol):
    """What a module of this folder offers. The kind of its result is `experiment/NAME`."""

    NAME: str
    SUMMARY: str

    def run(self, inputs: Inputs, journal: Journal) -> dict[str, Any]: ...
    def section(self, result: Result) -> Section: ...


def load(name: str) -> Experiment:
    """The module of an experiment. Raises KeyError."""
    return cast(Experiment, import_module(f"rest_local.bench.experiments.{EXPERIMENTS[name]}"))
