"""The number of decoding threads: all of them, or fewer while other programs use the processors.

`ThreadGovernor` receives the time of every forward pass and sets the number of threads of the next ones. After every
operation the threads of a pass wait for the slowest one. If the threads have to share processors, this wait outweighs
their work, and one thread can be several times faster than two. The governor finds the fastest number by trying it for
a window of passes. Exact mode never uses it, because logits can depend on the number of threads.

- After a busy window (the decoding thread waited for a processor, or passes took much longer than the fast ones) half
  the threads are tried, and the faster number stays.
- More threads are tried again after a pause. Every failed trial doubles the pause.
- When a busy machine becomes quiet, or the reverse, the pauses are short again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

WINDOW_S, WINDOW_PASSES = 0.25, 4
"""The least seconds and passes of a window: several time slices of the kernel's scheduler, 3 ms each."""

BUSY_DELAY = 0.25  # share of run delay in the time of a busy window; one other program per processor causes about half
BUSY_SLOWDOWN = 1.5  # a window this many times slower than the fast ones is busy too: another thread may be waiting
FORGET = 0.01  # of the fast windows' speed, per window: a longer context is slower on a quiet machine too
GAIN_IF_BUSY = 1.25  # how many times faster more threads must be on a busy machine, where their speed varies tenfold
GAIN_IF_QUIET = 0.95  # on a quiet machine more threads stay unless they are slower than this
SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 16.0
"""Seconds of decoding before a trial is repeated, at first and after many failures: one window in 16 s costs at most
1.5% even if the other number of threads makes hardly any progress."""
TRIAL_SHARE = 0.1  # of the time, at most, for failed trials: a trial with slow steps takes longer
STEADY = 2  # consecutive busy, or quiet, windows before the change counts

FEWER, MORE = 1, -1  # directions in the list of levels

Work = Callable[[Mapping[int, int]], float]  # passes by their number of tokens -> their cost in plain steps
RunDelay = Callable[[], float | None]


class ThreadGovernor:
    """`most`: threads on a quiet machine. `run_delay` returns the seconds that the calling thread has waited for a
    processor so far, None if the system does not report them. Not thread safe.
    """

    def __init__(self, most: int, run_delay: RunDelay | None = None) -> None:
        self.threads = most
        self._levels = _halvings(most)
        self._level = 0  # the present level, which a failed trial returns to
        self._trying = 0  # direction of the current trial, 0 without one
        self._run_delay = run_delay or run_delay_seconds
        self._speed = 0.0  # plain steps per second of windows at `_level`
        self._fastest = 0.0  # the best speed with all threads
        self._pause = {FEWER: 0.0, MORE: SHORT_PAUSE_S}
        self._since = 0.0  # seconds of decoding since the last trial
        self._busy = False
        self._other = 0  # consecutive windows that contradict `_busy`
        self.restart()

    def restart(self) -> None:
        """Start a new window, for example after a pass that evaluates a prompt."""
        self._passes: dict[int, int] = {}
        self._count = 0
        self._seconds = 0.0
        self._delay = self._run_delay()

    def after_pass(self, n_tokens: int, seconds: float, work: Work) -> bool:
        """Note that a pass of `n_tokens` took `seconds`. Returns True if `threads` has changed. Takes 1 us, and 30 us
        at the end of a window.
        """
        self._passes[n_tokens] = self._passes.get(n_tokens, 0) + 1
        self._count += 1
        self._seconds += seconds
        if self._seconds < WINDOW_S or self._count < WINDOW_PASSES:
            return False
        before = self.threads
        speed = work(self._passes) / self._seconds
        if self._trying:
            self._end_trial(speed)
        else:
            self._end_window(speed)
        self.restart()
        return self.threads != before

    def _end_window(self, speed: float) -> None:
        """End a window without a trial, and start a trial if one is due."""
        self._speed = (self._speed + speed) / 2 if self._speed else speed
        if self._level == 0:
            self._fastest = max(speed, (1 - FORGET) * self._fastest)
        self._since += self._seconds
        busy = self._is_delayed() or (self._level == 0 and speed * BUSY_SLOWDOWN < self._fastest)
        self._other = self._other + 1 if busy != self._busy else 0
        if self._other >= STEADY:
            self._busy, self._other = busy, 0
            self._pause = {direction: min(pause, SHORT_PAUSE_S) for direction, pause in self._pause.items()}
        if busy and self._may_try(FEWER):
            self._begin(FEWER)
        elif self._may_try(MORE):
            self._begin(MORE)

    def _is_delayed(self) -> bool:
        delay = self._run_delay()
        return self._delay is not None and delay is not None and delay - self._delay > BUSY_DELAY * self._seconds

    def _may_try(self, direction: int) -> bool:
        return 0 <= self._level + direction < len(self._levels) and self._since >= self._pause[direction]

    def _begin(self, direction: int) -> None:
        self._trying = direction
        self.threads = self._levels[self._level + direction]

    def _end_trial(self, speed: float) -> None:
        """End a trial: the faster number stays. On a busy machine the smaller one stays if both are about equal."""
        direction, self._trying, self._since = self._trying, 0, 0.0
        more = GAIN_IF_BUSY if self._is_delayed() else GAIN_IF_QUIET
        if speed > (1.0 if direction == FEWER else more) * self._speed:
            self._level += direction
            self._speed = speed
            self._pause[direction] = 0.0  # try the next level at once
            self._pause[-direction] = SHORT_PAUSE_S if direction == FEWER else 0.0
        else:
            longer = min(max(2 * self._pause[direction], SHORT_PAUSE_S), LONG_PAUSE_S)
            self._pause[direction] = max(longer, self._seconds / TRIAL_SHARE)
        self.threads = self._levels[self._level]


def _halvings(most: int) -> list[int]:
    """`most` and its halves down to 1: 8, 4, 2, 1."""
    levels = [most]
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    return levels


def run_delay_seconds() -> float | None:
    """The seconds that the calling thread has waited on a run queue since it started; None if the system does not
    report them. Takes 10 us. Linux: `/proc/thread-self/schedstat` (Documentation/scheduler/sched-stats).
    """
    try:
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
