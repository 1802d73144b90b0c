"""The account that keeps drafting from being slower than plain decoding, whatever the text.

Contract: milliseconds in, yes or no out. Every step earns a small share of a plain step's time; lookups and drafts pay
what they really cost beyond it, accepted tokens pay back what they saved, and who is out of credit decodes plainly. So
at any point of a request at most `ALLOWANCE` of its plain time is lost, and once a few steps: `LOOKUPS_START` for
looking, `OVERDRAFT_STEPS` behind a long repeat, which the sources recognise for next to nothing and which nearly always
goes on, `MATCH_STEPS` where what was looked up goes on from a long agreement with stored text.

Lookups have a purse of their own inside that: a model so fast that a lookup is a good part of its step would else spend
the whole allowance on looking where nothing is to be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable

ALLOWANCE = 0.03  # share of plain decoding time that lookups and failed drafts may lose together
LOOKUP_ALLOWANCE = 0.005  # and lookups alone
LOOKUPS_START = 0.5  # plain steps in the purse of a new request; so far lookups may overdraw the credit, too
OVERDRAFT_STEPS = 1.0  # how far a long repeat may overdraw the credit
MATCH_STEPS = 4.0  # how far a draft may that goes on from a long agreement with stored text
MOST_STEPS = 8.0  # credit is kept up to this many plain steps, so that old gains do not finance long losses
RECORD_STEPS = 400.0  # the track record looks back about this many steps


class Record:
    """What drafting gained a step, in plain steps, over the last requests: shared by the accounts of one engine."""

    def __init__(self) -> None:
        self.gain = 0.0


class Account:
    """One for each request; `begin` with it, `earn` before each step. Milliseconds throughout."""

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or Record()
        self._credit = 0.0
        self._purse = 0.0
        self._plain = 1.0
        self.risk = math.inf  # what the next draft may lose; no limit before the first request

    def begin(self, plain: float, stake: float = 0.0) -> None:
        """A new request. Its credit is what drafting gained a step of late: nothing on text that does not repeat; or
        `stake` plain steps, if that is more.
        """
        self._plain = plain
        self._credit = max(stake, min(self.record.gain, 1.0)) * plain
        self._purse = LOOKUPS_START * plain

    def earn(self, plain: float, steps: int = 1) -> None:
        """A step begins, the last of `steps` since this was called; a plain one would take `plain`."""
        self._plain = plain
        most = MOST_STEPS * plain
        self._credit = min(self._credit + steps * ALLOWANCE * plain, most)
        self._purse = min(self._purse + steps * LOOKUP_ALLOWANCE * plain, most)
        self.risk = self._credit
        self.record.gain *= (1.0 - 1.0 / RECORD_STEPS) ** steps

    def affords_lookup(self, lookup: float, repeats: Callable[[], bool]) -> bool:
        """Whether a lookup can be paid. `repeats` (is this a long repeat?) is asked where it matters."""
        overdraft = OVERDRAFT_STEPS * self._plain
        extra = overdraft if self._credit < 4 * overdraft and repeats() else 0.0
        self.risk += extra
        return self._purse + extra > lookup and self.risk + LOOKUPS_START * self._plain > lookup

    def overdraw(self) -> None:
        """What was found goes on from a long agreement with stored text: its draft may overdraw the credit."""
        self.risk = max(self.risk, self._credit + MATCH_STEPS * self._plain)

    def pay_lookup(self, ms: float) -> None:
        """What asking the sources took, in vain with all that came of it."""
        self._credit -= ms
        self._purse -= ms
        self._note(-ms)

    def settle(self, saved: float) -> None:
        """What a draft saved against plain steps; negative where it failed."""
        self._credit += saved
        self._purse += max(0.0, saved)
        self._note(saved)

    def _note(self, gained: float) -> None:
        self.record.gain += gained / self._plain / RECORD_STEPS
