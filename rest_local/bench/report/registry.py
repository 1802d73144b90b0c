"""Which function shows a kind of result. Modules are imported when a report needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import cast

from rest_local.bench.report.shapes import Section
from rest_local.bench.results import Result

EXPERIMENT = "experiment/"
COMPARE = "rest_local.bench.comparing.section"
FIRST = ("suite", "compare", "replay")
"""Kinds in the order of the report; the experiments follow in the order of their catalog."""

_Section = Callable[[Result], Section]
Shown = Sequence[tuple[Section, Sequence[Result]]]


def place(kind: str) -> tuple[int, int, str]:
    """Sorts kinds into the order of the report."""
    if kind in FIRST:
        return 0, FIRST.index(kind), kind
    names = list(_experiments())
    name = kind.removeprefix(EXPERIMENT)
    return 1, names.index(name) if name in names else len(names), kind


def sections_of(kind: str) -> Callable[[Sequence[Result]], Shown]:
    """What makes sections of all results of one kind: each section with the results that it shows. Raises KeyError for
    an unknown kind.
    """
    if kind == "replay":  # several workloads in one section
        from rest_local.bench.report.replayed import section

        return lambda results: [(section(results), results)]
    one = _one_by_one(kind)
    return lambda results: [(one(result), [result]) for result in results]


def shipped_sections() -> Iterator[Section]:
    """Sections that need no result."""
    from rest_local.bench.report.curves import section

    yield section()


def _one_by_one(kind: str) -> _Section:
    if kind == "suite":
        from rest_local.bench.report.suite_run import section

        return section
    if kind == "compare":
        return cast(_Section, import_module(COMPARE).section)
    if not kind.startswith(EXPERIMENT):
        raise KeyError(kind)
    from rest_local.bench.experiments.catalog import load

    return load(kind.removeprefix(EXPERIMENT)).section


def _experiments() -> Sequence[str]:
    from rest_local.bench.experiments.catalog import EXPERIMENTS

    return list(EXPERIMENTS)
