"""How many threads decode, and how they wait for each other: as on a quiet machine, or sparingly on a busy one.

`ThreadGovernor` receives the time of every forward pass and sets the level of the next ones. After every operation the
threads of a pass wait for the slowest one. If the threads have to share processors, threads that spin while they wait
take the time of the one that they wait for, and two of them can be a hundred times slower than one. The governor finds
the fastest level by trying it for a window of passes.

- The levels: all threads, which spin while they wait; all threads, which wait briefly and sleep then (the same bits);
  then ever fewer threads, where the bits of the logits do not matter or do not depend on the number.
- After a busy window (the decoding thread waited for a processor, or passes took much longer than the fast ones) the
  next level is tried, and the faster one stays.
- The level before is tried again after a pause. Every failed trial doubles the pause. Threads spin again only after a
  window that was not busy.
- When a busy machine becomes quiet, or the reverse, the pauses are short again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

WINDOW_S = 0.25  # many time slices of the kernel's scheduler, 3 ms each

BUSY_DELAY = 0.25  # share of its time that a thread waits for a processor on a busy machine: about half with one other
# program for each
BUSY_SLOWDOWN = 1.5  # a window this many times slower than the fast ones is busy too: another thread may be waiting. On
# a busy machine more threads that spin must be so many times faster to stay, because their speed varies tenfold
FORGET = 0.01  # of the fast windows' speed, per window: a longer context is slower on a quiet machine too
SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 16.0
"""Seconds of decoding before a trial is repeated, at first and after many failures: one window in 16 s costs at most
1.5% even if the other number of threads makes hardly any progress."""

FEWER, MORE = 1, -1  # directions in the list of levels

Work = Callable[[Mapping[int, int]], float]  # passes by their number of tokens -> their cost in plain steps
RunDelay = Callable[[], float | None]


class Level(NamedTuple):
    """`brief`: threads sleep almost at once while they wait (`llama.cores.wait_briefly`)."""

    threads: int
    brief: bool


def levels(most: int, fewer: bool, brief: bool) -> list[Level]:
    """The levels of a governor, that of a quiet machine first. `fewer`: the number of threads may change. `brief`:
    threads can wait briefly.
    """
    found = [Level(most, False)]
    if most > 1 and brief:
        found.append(Level(most, True))
    return [*found, *(Level(n, brief) for n in halvings(most)[1:] if fewer)]


class ThreadGovernor:
    """`levels`: as the function of this name gives them. `busy`: other programs seem to run now, so begin with brief
    waits. `run_delay` returns
    the seconds that the calling thread has waited for a processor so far, None if the system does not report them. Not
    thread safe. More levels may be added at the end of `levels` later.
    """

    def __init__(self, levels: list[Level], busy: bool = False, run_delay: RunDelay | None = None) -> None:
        self.levels = levels
        self._at = int(
            busy and any(level.brief for level in levels[1:2])
        )  # the present level, which a failed trial returns to
        self.level = levels[self._at]  # of the next passes
        self._trying = 0  # direction of the current trial, 0 without one
        self._run_delay = run_delay or run_delay_seconds
        self._speed = 0.0  # plain steps per second of windows at the present level
        self._fastest = 0.0  # the best speed at the first level
        self._pause = {FEWER: 0.0, MORE: 0.0 if busy else SHORT_PAUSE_S}
        self._since = 0.0  # seconds of decoding since the last trial
        self._busy = busy
        self.restart()

    @property
    def yields(self) -> bool:
        """Whether the passes are slower than on a quiet machine, for the sake of other programs."""
        return self.level != self.levels[0]

    def restart(self) -> None:
        """Start a new window, for example after a pass that evaluates a prompt."""
        self._passes: dict[int, int] = {}
        self._seconds = 0.0
        self._delay = self._run_delay()

    def after_pass(self, n_tokens: int, seconds: float, work: Work) -> bool:
        """Note that a pass of `n_tokens` took `seconds`. Returns True if `level` has changed. Takes 1 us, and 30 us at
        the end of a window.
        """
        self._passes[n_tokens] = self._passes.get(n_tokens, 0) + 1
        self._seconds += seconds
        if self._seconds < WINDOW_S:
            return False
        before = self.level
        speed = work(self._passes) / self._seconds
        if self._trying:
            self._end_trial(speed)
        else:
            self._end_window(speed)
        self.restart()
        return self.level != before

    def _end_window(self, speed: float) -> None:
        """End a window without a trial, and start a trial if one is due."""
        self._speed = (self._speed + speed) / 2 if self._speed else speed
        if self._at == 0:
            self._fastest = max(speed, (1 - FORGET) * self._fastest)
        self._since += self._seconds
        busy = self._is_delayed() or (self._at == 0 and speed * BUSY_SLOWDOWN < self._fastest)
        if busy != self._busy:
            self._busy = busy
            self._pause = {direction: min(pause, SHORT_PAUSE_S) for direction, pause in self._pause.items()}
        if busy and self._may_try(FEWER):
            self._begin(FEWER)
        elif self._may_try(MORE) and not (busy and self._spins_instead):
            self._begin(MORE)

    def _is_delayed(self) -> bool:
        delay = self._run_delay()
        return self._delay is not None and delay is not None and delay - self._delay > BUSY_DELAY * self._seconds

    @property
    def _spins_instead(self) -> bool:
        """Whether the level before the present one has threads that spin, and this one has not."""
        return self.levels[self._at].brief and not self.levels[self._at - 1].brief

    def _may_try(self, direction: int) -> bool:
        return 0 <= self._at + direction < len(self.levels) and self._since >= self._pause[direction]

    def _begin(self, direction: int) -> None:
        self._trying = direction
        self.level = self.levels[self._at + direction]

    def _end_trial(self, speed: float) -> None:
        """End a trial: the faster level stays. On a busy machine threads that spin have to be BUSY_SLOWDOWN as fast."""
        direction, self._trying, self._since = self._trying, 0, 0.0
        spins = direction == MORE and not self.levels[self._at + direction].brief
        if speed > (BUSY_SLOWDOWN if spins and self._is_delayed() else 1.0) * self._speed:
            self._at += direction
            self._speed = speed
            self._pause[direction] = 0.0  # try the next level at once
            self._pause[-direction] = SHORT_PAUSE_S if direction == FEWER else 0.0
        else:
            self._pause[direction] = min(max(2 * self._pause[direction], SHORT_PAUSE_S), LONG_PAUSE_S)
        self.level = self.levels[self._at]


def halvings(most: int) -> list[int]:
    """`most` and its halves down to 1: 8, 4, 2, 1."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def run_delay_seconds() -> float | None:
    """The seconds that the calling thread has waited on a run queue since it started; None if the system does not
    report them. Takes 10 us. Linux: `/proc/thread-self/schedstat` (Documentation/scheduler/sched-stats).
    """
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
