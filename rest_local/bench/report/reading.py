"""The results of a folder, and what each becomes in a report.

A file that is no usable result is left out and named with its reason, as long as another one is usable. Results of
different machines and versions may be in one report, which says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rest_local.bench.report import registry
from rest_local.bench.report.shapes import Section
from rest_local.bench.results import Result
from rest_local.errors import InputInvalid, ResultInvalid

LARGEST = 32 * 2**20  # bytes of a result: the largest have some hundred kilobytes
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What code that shows a result raises if a field is missing or of another type."""


@dataclass(frozen=True)
class Part:
    """One section, and the results that it shows. No results: it shows what comes with the package."""

    section: Section
    results: Sequence[Result] = ()


@dataclass(frozen=True)
class Report:
    """`left_out`: file and reason. `figures`: why there are none, "" if there are."""

    parts: Sequence[Part]
    left_out: Sequence[tuple[str, str]] = field(default=())
    figures: str = ""

    @property
    def results(self) -> list[Result]:
        """All that are shown."""
        return [result for part in self.parts for result in part.results]


def read(folder: Path) -> Report:
    """The report on all results of a folder. Raises InputInvalid without any, ResultInvalid if none is usable, OSError
    if the folder cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    if not files:
        raise InputInvalid(
            "folder of results", folder, "holds no result; `rest-local bench suite DIR` measures what it shows"
        )
    found: dict[str, Result] = {}
    left_out: list[tuple[str, str]] = []
    for path in files:
        try:
            found[path.name] = load(path)
        except (ResultInvalid, OSError) as error:
            left_out.append((path.name, reason(error)))
    parts = []
    for kind, names in _by_kind(found).items():
        parts += _parts(kind, {name: found[name] for name in names}, left_out)
    if not parts:
        causes = "; ".join(f"{name}: {cause}" for name, cause in left_out)
        raise ResultInvalid(folder, f"no file of it can be shown ({causes})")
    return Report([*parts, *(Part(section) for section in registry.shipped_sections())], left_out)


def load(path: Path) -> Result:
    """`Result.load`, and a limit to the size of a file. Raises ResultInvalid, OSError."""
    if path.stat().st_size > LARGEST:
        raise ResultInvalid(path, f"larger than {LARGEST >> 20} MB, as no result is")
    return Result.load(path)


def reason(error: Exception) -> str:
    """Why a file is left out, without its path."""
    return error.cause if isinstance(error, ResultInvalid) else str(getattr(error, "strerror", None) or error)


def _by_kind(found: dict[str, Result]) -> dict[str, list[str]]:
    """Names of files by kind, in the order of the report."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(found, key=lambda name: (registry.place(found[name].kind), name)):
        kinds.setdefault(found[name].kind, []).append(name)
    return kinds


def _parts(kind: str, results: dict[str, Result], left_out: list[tuple[str, str]]) -> list[Part]:
    """The sections of one kind; what cannot be shown is added to `left_out`."""
    try:
        show = registry.sections_of(kind)
    except KeyError:
        left_out += ((name, f"this version knows no measurement {kind!r}") for name in results)
        return []
    except ImportError as error:
        left_out += ((name, f"what shows it cannot be loaded ({error})") for name in results)
        return []
    good: dict[str, Result] = {}
    for name, result in results.items():
        try:
            show([result])
            good[name] = result
        except WRONG as error:
            left_out.append((name, f"a field is missing or wrong ({type(error).__name__}: {error})"))
    parts = []
    for section, shown in show(list(good.values())) if good else ():
        parts.append(Part(section, shown))
    return parts
