"""The energy that the machine used, where the platform tells it: RAPL counters of Linux (package domains, joules).

The counters belong to the whole processor, so they include whatever else the machine did. Memory outside the package
and a graphics card are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class _Zone:
    """One counter in microjoules, which begins again at 0 after `largest`."""

    counter: Path
    largest: int


class Energy:
    """`reason` says why there is no figure; None where there is one."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: list[_Zone] = []
        self._before: list[int] | None = None
        self.reason: str | None = self._find(root)

    def _find(self, root: Path) -> str | None:
        found = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)  # packages, no parts
        if not found:
            return f"no energy counters in {root}"
        try:
            for path in found:
                zone = _Zone(path / "energy_uj", int((path / "max_energy_range_uj").read_text()))
                int(zone.counter.read_text())
                self._zones.append(zone)
        except (OSError, ValueError) as error:
            self._zones = []
            return f"the energy counters cannot be read ({error})"
        return None

    def begin(self) -> None:
        """Read the counters before a run."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Since `begin`; None where the platform does not tell."""
        now = self._read()
        if now is None or self._before is None:
            return None
        pairs = zip(self._zones, self._before, now, strict=True)
        return 1e-6 * sum(after - before + (zone.largest if after < before else 0) for zone, before, after in pairs)

    def _read(self) -> list[int] | None:
        if not self._zones:
            return None
        try:
            return [int(zone.counter.read_text()) for zone in self._zones]
        except (OSError, ValueError):
            return None
