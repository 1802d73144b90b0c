"""Where the figures of a report come from: commands, machines, versions, dates, and what to keep in mind about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rest_local.bench.report.reading import Part, Report
from rest_local.bench.report.text import duration
from rest_local.bench.results import Machine, Result

BUSY = 0.5  # running processes for each core from which on other programs disturbed the measurement

UNTIMED = ("replay", "suite")
"""Kinds whose figures depend on no clock."""

COLUMNS = ("command", "machine", "version", "date", "took")


def origin(part: Part) -> list[tuple[str, ...]]:
    """One row of COLUMNS for each result of a section; one for the section without results."""
    section = part.section
    if not part.results:
        return [(section.command, section.machine, "", "", "")] if section.command else []
    return [
        (
            result.command + (" (quick)" if result.quick and "--quick" not in result.command else ""),
            (section.machine or result.machine.line()) + (" (busy)" if busy(result) else ""),
            result.version,
            result.started[:10],
            duration(result.seconds),
        )
        for result in part.results
    ]


def busy(result: Result) -> bool:
    """Whether other programs took much of the machine, and figures depend on it."""
    machine = result.machine
    return result.kind not in UNTIMED and machine.load > BUSY * max(machine.cores, 1)


def quick(results: Sequence[Result]) -> bool:
    """Whether a section shows a first look."""
    return any(result.quick for result in results)


def remarks(report: Report) -> Iterator[str]:
    """Sentences for the top of a report: what the reader has to know before any figure."""
    results = report.results
    machines = list(dict.fromkeys(_without_load(result.machine) for result in results))
    versions = list(dict.fromkeys(result.version for result in results))
    if len(machines) == 1:
        yield f"Measured on {machines[0]}."
    elif machines:
        yield (
            f"The results come from {len(machines)} machines. Compare figures within a section only: "
            f"{'; '.join(machines)}."
        )
    if len(versions) == 1:
        yield f"Version {versions[0]} of rest-local."
    elif versions:
        yield f"The results come from {len(versions)} versions of rest-local: {', '.join(versions)}."
    if dates := sorted({result.started[:10] for result in results}):
        yield f"Dates: {dates[0]}." if len(dates) == 1 else f"Dates: {dates[0]} to {dates[-1]}."
    if hurried := [part.section.title for part in report.parts if quick(part.results)]:
        yield f"Measured with `--quick`, on fewer prompts and only as a first look: {_listed(hurried)}."
    if disturbed := [part.section.title for part in report.parts if any(map(busy, part.results))]:
        yield (
            "Other programs ran while these were measured. Their counts hold, their times do not: "
            f"{_listed(disturbed)}."
        )
    if report.figures:
        yield f"This report has tables only: {report.figures}."


def _listed(titles: Sequence[str]) -> str:
    """Titles may hold commas. Two results may have the same one."""
    return "; ".join(dict.fromkeys(titles))


def _without_load(machine: Machine) -> str:
    parts = [machine.processor, f"{machine.cores} cores", *([machine.accelerator] if machine.accelerator else [])]
    libraries = [f"{name} {version}" for name, version in (machine.libraries or {}).items()]
    return ", ".join([*parts, f"{machine.memory_gb:g} GB", machine.system, f"Python {machine.python}", *libraries])
