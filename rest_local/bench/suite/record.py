"""What the suite has done in a folder: the file `suite.json`, a result of the kind "suite", written after each part.

`data`: {"parts": {name: {"file", "state", "reason", "seconds", "options"}}}; the states are those of STATES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rest_local
from rest_local.bench.results import Result, now, this_machine
from rest_local.bench.suite.parts import Part
from rest_local.errors import ResultInvalid

FILE = "suite.json"
MEASURED, LEFT_OUT, FAILED = STATES = ("measured", "left out", "failed")


@dataclass(frozen=True)
class Outcome:
    """One part. seconds: that it took; reason: why there is no result."""

    file: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


class Record:
    """The outcomes by name, and the file that they are in."""

    def __init__(self, folder: Path, command: str, *, quick: bool) -> None:
        """Read the file if it is there. Raises ResultInvalid, OSError."""
        self.path = folder / FILE
        self._command, self._quick = command, quick
        self._machine, self._started = this_machine(), now()
        self.outcomes: dict[str, Outcome] = {}
        if self.path.exists():
            found = Result.load(self.path)
            try:
                self.outcomes = {name: Outcome(**row) for name, row in found.data["parts"].items()}
            except (KeyError, TypeError, AttributeError) as error:
                raise ResultInvalid(self.path, f"not the record of a suite ({error}); remove it") from error

    def put(self, name: str, outcome: Outcome) -> None:
        """Raises OSError."""
        self.outcomes[name] = outcome
        self.save()

    def keep(self, names: Sequence[str]) -> None:
        """Forget parts that the suite has no longer."""
        self.outcomes = {name: self.outcomes[name] for name in names if name in self.outcomes}

    def save(self) -> None:
        """Raises OSError."""
        Result(
            kind="suite",
            command=self._command,
            machine=self._machine,
            version=rest_local.__version__,
            started=self._started,
            seconds=round(sum(outcome.seconds for outcome in self.outcomes.values()), 1),
            quick=self._quick,
            data={"parts": {name: asdict(outcome) for name, outcome in self.outcomes.items()}},
        ).save(self.path)


def why_not(part: Part, folder: Path, record: Record, *, quick: bool) -> str | None:
    """Why the result of a part that is in the folder is not what this run would measure; None if it is, or if there is
    none. Raises OSError.
    """
    path = folder / part.file
    if not path.exists():
        return None
    try:
        result = Result.load(path)
    except ResultInvalid as error:
        return error.cause
    if result.version != rest_local.__version__:
        return f"measured by version {result.version}, and this is {rest_local.__version__}"
    if result.quick != quick:
        return "measured with --quick" if result.quick else "measured without --quick"
    known = record.outcomes.get(part.name)
    if known is not None and known.state == MEASURED and known.options != part.options:
        names = sorted(
            name for name in {*known.options, *part.options} if known.options.get(name) != part.options.get(name)
        )
        return f"measured with another {' and '.join(names)}"
    return None
