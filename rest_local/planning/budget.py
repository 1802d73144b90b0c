"""What a request may lose to drafts that fail, in milliseconds.

Contract: every step earns a small share of a plain step, drafts pay what they cost beyond a plain step, and accepted
tokens pay back what they save. A draft may cost at most the credit plus a fixed share of what it is expected to save,
and may never take the credit below a small floor. So at any point of a request, whatever the text and however wrong
the estimates are, drafts have lost at most `ALLOWANCE` of its plain time and `FLOOR` plain steps.
"""

from __future__ import annotations

ALLOWANCE = 0.03  # share of plain decoding time that failed drafts may lose
CONFIDENCE = 0.5  # share of the expected saving that a draft may stake beyond the credit
FLOOR = 3.0  # plain steps: how far that may overdraw the credit; 8 gain 0.4% on edits, and worst answers fall to 0.93
MOST = 8.0  # plain steps that are kept, so that old gains do not finance long losses


class Budget:
    """One for each request; `begin` with it, `earn` before each step."""

    def __init__(self) -> None:
        self.credit = 0.0
        self._plain = 1.0

    def begin(self, plain: float, credit: float = 0.0) -> None:
        """A new request, whose plain step takes `plain`; `credit`: plain steps that it may lose at once."""
        self._plain = plain
        self.credit = credit * plain

    def earn(self, plain: float) -> None:
        """A step begins; a plain one would take `plain`."""
        self._plain = plain
        self.credit = min(self.credit + ALLOWANCE * plain, MOST * plain)

    @property
    def most(self) -> float:
        """What the next draft may cost, however much it promises."""
        return self.credit + FLOOR * self._plain

    def allows(self, extra: float, saving: float) -> bool:
        """Whether a draft may cost `extra` more than a plain step, where it is expected to save `saving` in all."""
        return extra <= self.credit + min(CONFIDENCE * saving, FLOOR * self._plain)

    def settle(self, saved: float) -> None:
        """What a draft saved against plain steps; negative where it failed."""
        self.credit += saved
