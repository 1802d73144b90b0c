"""How many threads decode: all of them, or fewer while other programs want the processors.

Contract: `ThreadGovernor` is told what every forward pass took and says how many threads the next ones have. The
threads of a forward pass wait for the slowest of them after every operation; where each gets a part of a processor,
that wait outgrows what the others add, and one thread can be several times faster than two. Which number is fastest is
found by trying it for a window. Never used where bits are promised: they can depend on the number of threads (DESIGN.md
section 4).

A busy window (the decoding thread stood in line for a processor, or passes took much longer than the quick ones) is
followed by one with half the threads, and the faster number stays. From fewer threads, more are tried again after a
pause, which every failed trial doubles; when a busy machine becomes quiet, or the reverse, the pauses are short again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

WINDOW_S, WINDOW_PASSES = 0.25, 4
"""A window has at least so many seconds and passes: some turns of the kernel's scheduler, which gives a thread 3 ms."""

IN_LINE = 0.25  # of the time: from here on others want the processors; one program per processor takes about half
SLOW = 1.5  # times what quick windows need: busy as well, when it is another thread than the decoding one that waits
FORGET = 0.01  # of the quick windows' speed, per window: a longer context is slower without being busy
CLEARLY = 1.25  # times: how much faster more threads must be on a busy machine, where their speed varies tenfold
NEARLY = 0.95  # times: where nothing stands in line, more threads stay unless they are slower than this
SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 16.0
"""Seconds of decoding before a trial is repeated, at first and after many that failed: one window in 16 s costs at most
1.5% even where the other number of threads gives next to nothing."""
TRIAL_SHARE = 0.1  # of the time, at most, for failed trials: those of slow steps take longer
STEADY = 2  # windows in a row that are busy, or quiet, before that counts as a change

FEWER, MORE = 1, -1  # directions in the list of levels

Work = Callable[[Mapping[int, int]], float]  # passes by their number of tokens, in plain steps
InLine = Callable[[], float | None]


class ThreadGovernor:
    """`most`: threads on a quiet machine. `in_line` returns the seconds that the calling thread has stood in line for a
    processor so far, None where the system does not tell. Not thread safe.
    """

    def __init__(self, most: int, in_line: InLine | None = None) -> None:
        self.threads = most
        self._levels = _halvings(most)
        self._level = 0  # the one to return to after a trial
        self._trying = 0  # direction of the trial under way
        self._in_line = in_line or seconds_in_line
        self._speed = 0.0  # of windows at `_level`
        self._quick = 0.0  # the best of them with all threads
        self._pause = {FEWER: 0.0, MORE: SHORT_PAUSE_S}
        self._since = 0.0  # seconds of decoding since the last trial
        self._busy = False
        self._other = 0  # windows in a row that said the opposite of `_busy`
        self.restart()

    def restart(self) -> None:
        """The window begins anew: a pass was not of the usual kind, such as a prompt."""
        self._passes: dict[int, int] = {}
        self._count = 0
        self._seconds = 0.0
        self._stood = self._in_line()

    def after_pass(self, n_tokens: int, seconds: float, work: Work) -> bool:
        """A pass of `n_tokens` took `seconds`. True where `threads` has changed. 1 us, at a window's end 30."""
        self._passes[n_tokens] = self._passes.get(n_tokens, 0) + 1
        self._count += 1
        self._seconds += seconds
        if self._seconds < WINDOW_S or self._count < WINDOW_PASSES:
            return False
        before = self.threads
        speed = work(self._passes) / self._seconds
        if self._trying:
            self._judge(speed)
        else:
            self._consider(speed)
        self.restart()
        return self.threads != before

    def _consider(self, speed: float) -> None:
        """A usual window has ended: begin a trial, or go on."""
        self._speed = (self._speed + speed) / 2 if self._speed else speed
        if self._level == 0:
            self._quick = max(speed, (1 - FORGET) * self._quick)
        self._since += self._seconds
        busy = self._stands_in_line() or (self._level == 0 and speed * SLOW < self._quick)
        self._other = self._other + 1 if busy != self._busy else 0
        if self._other >= STEADY:
            self._busy, self._other = busy, 0
            self._pause = {direction: min(pause, SHORT_PAUSE_S) for direction, pause in self._pause.items()}
        if busy and self._may_try(FEWER):
            self._begin(FEWER)
        elif self._may_try(MORE):
            self._begin(MORE)

    def _stands_in_line(self) -> bool:
        stood = self._in_line()
        return self._stood is not None and stood is not None and stood - self._stood > IN_LINE * self._seconds

    def _may_try(self, direction: int) -> bool:
        return 0 <= self._level + direction < len(self._levels) and self._since >= self._pause[direction]

    def _begin(self, direction: int) -> None:
        self._trying = direction
        self.threads = self._levels[self._level + direction]

    def _judge(self, speed: float) -> None:
        """A trial has ended: the faster number stays, of two about equal ones the smaller where others compute."""
        direction, self._trying, self._since = self._trying, 0, 0.0
        more = CLEARLY if self._stands_in_line() else NEARLY
        if speed > (1.0 if direction == FEWER else more) * self._speed:
            self._level += direction
            self._speed = speed
            self._pause[direction] = 0.0  # perhaps further
            self._pause[-direction] = SHORT_PAUSE_S if direction == FEWER else 0.0
        else:
            longer = min(max(2 * self._pause[direction], SHORT_PAUSE_S), LONG_PAUSE_S)
            self._pause[direction] = max(longer, self._seconds / TRIAL_SHARE)
        self.threads = self._levels[self._level]


def _halvings(most: int) -> list[int]:
    """8, 4, 2, 1."""
    levels = [most]
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    return levels


def seconds_in_line() -> float | None:
    """How long the calling thread has been ready to run without a processor since it began; None where the system does
    not tell. 10 us. Linux: `/proc/thread-self/schedstat` (Documentation/scheduler/sched-stats).
    """
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
