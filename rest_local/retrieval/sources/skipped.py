"""The count of what a source skipped, and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rest_local.errors import printable

UNWANTED = "not a wanted kind of file"
_NAMED = 20
_KINDS, _KINDS_SHOWN, _KIND_LENGTH = 100, 8, 20


@dataclass(slots=True)
class Skipped:
    """The files that a walk skipped. Its size does not depend on their number.

    counts: files by reason; kinds: unwanted files by extension, `other` after the first 100 extensions; secrets: the
    first names of files that looked like secrets.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    secrets: list[str] = field(default_factory=list)

    def add(self, reason: str, name: str = "") -> None:
        """Count one file."""
        self.counts[reason] += 1
        if reason == UNWANTED:
            kind = printable(os.path.splitext(name)[1].lower()[:_KIND_LENGTH]) or "no extension"
            self.kinds[kind if kind in self.kinds or len(self.kinds) < _KINDS else "other"] += 1
        elif reason == "secret" and len(self.secrets) < _NAMED:
            self.secrets.append(printable(name))

    def summary(self) -> str:
        """One line: "12 binary, 9 not a wanted kind of file (6 .json, 3 .ipynb)", or "nothing"."""
        parts = [f"{count} {reason}" for reason, count in self.counts.most_common()]
        kinds = [f"{count} {kind}" for kind, count in self.kinds.most_common(_KINDS_SHOWN)]
        kinds += ["..."] if len(self.kinds) > _KINDS_SHOWN else []
        parts = [f"{part} ({', '.join(kinds)})" if kinds and part.endswith(UNWANTED) else part for part in parts]
        return ", ".join(parts) or "nothing"


def joined(parts: Iterable[Skipped]) -> Skipped:
    """What several sources skipped together."""
    whole = Skipped()
    for part in parts:
        whole.counts.update(part.counts)
        whole.kinds.update(part.kinds)
        whole.secrets = [*whole.secrets, *part.secrets][:_NAMED]
    return whole
