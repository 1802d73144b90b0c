"""The number of threads, and how they wait, follow the load of the machine.

Step times are scripted; no clock is used.
"""

import math
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from rest_local import Engine
from rest_local.calibration.threads import LONG_PAUSE_S, Level, ThreadGovernor, levels
from rest_local.llama import cores
from rest_local.llama.context import Context


def plain_steps(passes: Mapping[int, int]) -> float:
    """Each further token of a batch costs half a plain step."""
    return sum(count * (1 + 0.5 * (n - 1)) for n, count in passes.items())


class Machine:
    """`step_ms(threads)`: of a plain step; `brief_ms`: of threads that wait briefly; `delay_share(threads)`: share of
    the time in which the thread waits.
    """

    def __init__(self, most: int = 2, reports: bool = True, brief: bool = False, fewer: bool = True) -> None:
        self.step_ms: Callable[[int], float] = self.quiet
        self.delay_share: Callable[[int], float] = lambda threads: 0.0
        self.delay = self.clock = self.spun = 0.0
        self.reports = reports
        self.brief_ms: Callable[[int], float] = self.quiet
        self.governor = ThreadGovernor(
            levels(most, fewer, brief), run_delay=lambda: self.delay if self.reports else None
        )
        self.history: list[tuple[float, int]] = []  # (time of a pass, its threads)

    @staticmethod
    def quiet(threads: int) -> float:
        return {1: 20.0, 2: 12.0, 4: 8.0, 8: 5.0}[threads]

    def busy(self, threads: int, best: int = 1) -> float:
        """Slower by the square of how many times more threads there are than the best number."""
        return self.quiet(best) * 2 * (max(threads / best, 1.0) ** 2 if threads >= best else 1.5)

    def load(self, best: int = 1) -> None:
        self.step_ms = lambda threads: self.busy(threads, best)
        self.delay_share = lambda threads: 0.5

    def calm(self) -> None:
        self.step_ms, self.delay_share = self.quiet, lambda threads: 0.0

    def run(self, seconds: float, n_tokens: int = 1) -> None:
        end = self.clock + seconds
        while self.clock < end:
            threads, brief = self.governor.level
            took = 1e-3 * (self.brief_ms if brief else self.step_ms)(threads) * plain_steps({n_tokens: 1})
            self.clock += took
            self.delay += took * self.delay_share(threads)
            self.governor.after_pass(n_tokens, took, plain_steps)
            self.history.append((took, threads))
            self.spun += 0.0 if brief else took

    def share(self, threads: int, last: float) -> float:
        """The share of the `last` seconds that was decoded with `threads` threads."""
        found = total = 0.0
        for took, used in reversed(self.history):
            if total >= last:
                break
            total += took
            found += took * (used == threads)
        return found / total


@pytest.mark.parametrize("reports", [True, False])
def test_a_busy_machine_gets_fewer_threads_and_a_quiet_one_all_of_them(reports: bool) -> None:
    machine = Machine(reports=reports)
    machine.run(3.0)
    machine.load()
    machine.run(3.0)
    assert machine.share(1, last=2.0) > 0.5
    machine.run(60.0)
    assert machine.share(1, last=60.0) > 0.9
    machine.calm()
    machine.run(LONG_PAUSE_S + 2.0)
    assert machine.share(2, last=0.5) == 1.0
    if reports:  # it notices at once, without waiting for the end of the pause
        machine.load()
        machine.run(60.0)
        machine.calm()
        machine.run(3.0)
        assert machine.share(2, last=0.5) == 1.0


def test_it_does_not_oscillate() -> None:
    """Trials of more threads become rare under a constant load."""
    machine = Machine()
    machine.load()
    machine.run(200.0)
    changes = [threads for threads, _ in groupby(threads for _, threads in machine.history)]
    assert 5 < len(changes) < 40
    late = Machine()
    late.load()
    late.run(100.0)
    before = len(late.history)
    late.run(100.0)
    runs = [threads for threads, _ in groupby(threads for _, threads in late.history[before:])]
    assert len(runs) < 16


def test_fruitless_trials_cost_little() -> None:
    """Other programs use the processors, yet all threads are the fastest."""
    machine = Machine()
    machine.step_ms = lambda threads: {2: 24.0, 1: 100.0}[threads]
    machine.delay_share = lambda threads: 0.5
    machine.run(120.0)
    assert machine.share(2, last=120.0) > 0.9
    machine.run(100.0)
    assert machine.share(2, last=100.0) > 0.93


def test_a_short_fast_phase_under_load_does_not_bring_all_threads_back() -> None:
    """Under load, two threads are sometimes as fast as one, and otherwise five times slower."""
    machine = Machine()
    machine.step_ms = lambda threads: 40.0 if threads == 1 else 36.0 if int(machine.clock) % 3 == 0 else 200.0
    machine.delay_share = lambda threads: 0.5
    machine.run(300.0)
    assert machine.share(1, last=250.0) > 0.9


def test_the_best_of_many_thread_counts_is_found() -> None:
    machine = Machine(most=8)
    machine.load(best=2)
    machine.run(5.0)
    machine.run(20.0)
    assert machine.share(2, last=20.0) > 0.8
    machine.calm()
    machine.run(30.0)
    assert machine.share(8, last=0.5) == 1.0


def test_a_longer_context_does_not_count_as_load() -> None:
    machine = Machine(reports=False)
    slower = 1.0
    machine.step_ms = lambda threads: slower * machine.quiet(threads)
    for _ in range(400):
        slower *= 1.005
        machine.run(0.3)
    assert slower > 7
    assert {threads for _, threads in machine.history} == {2}


def under_load(machine: Machine) -> None:
    """Threads that spin take the processor from each other; those that sleep get their share."""
    machine.step_ms = lambda threads: 500.0 if threads == 2 else 60.0
    machine.brief_ms = lambda threads: 30.0 if threads == 2 else 60.0
    machine.delay_share = lambda threads: 0.5


@pytest.mark.parametrize("fewer", [True, False])
def test_all_threads_that_wait_briefly_are_the_fastest_on_a_busy_machine(fewer: bool) -> None:
    machine = Machine(brief=True, fewer=fewer)
    machine.run(3.0)
    assert machine.spun > 2.9
    under_load(machine)
    machine.run(2.5)
    machine.spun = 0.0
    machine.run(100.0)
    assert machine.spun == 0.0, "no trial of threads that spin while the machine is busy"
    assert machine.share(2, last=100.0) > 0.95
    machine.calm()
    machine.run(LONG_PAUSE_S + 2.0)
    machine.spun = 0.0
    machine.run(10.0)
    assert machine.spun > 9.5
    assert machine.share(2, last=10.0) == 1.0


def test_an_engine_that_opens_on_a_busy_machine_begins_with_brief_waits() -> None:
    quiet = Machine(brief=True)
    quiet.brief_ms = lambda threads: 60.0
    quiet.governor = ThreadGovernor(quiet.governor.levels, busy=True, run_delay=lambda: 0.0)
    assert quiet.governor.level == (2, True)
    quiet.run(1.0)
    assert quiet.governor.level == (2, False), "one look at the machine was wrong"
    assert ThreadGovernor([Level(2, False), Level(1, False)], busy=True).level == (2, False)
    assert ThreadGovernor([Level(2, False)], busy=True).level == (2, False)


@pytest.mark.parametrize(("exact", "threads", "adapts"), [(False, None, True), (True, None, True), (False, 2, False)])
def test_a_given_thread_count_stays(
    exact: bool,
    threads: int | None,
    adapts: bool,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every window is busy here, and fewer threads are always faster. In these exact settings the bits are the same."""
    set_to: list[int] = []
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    two_threads(monkeypatch)
    use = Context.use_threads
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=256, exact=exact, threads=threads) as engine:
        if exact:
            engine.compare(math.inf)
            assert engine.self_test["any_threads"]
        monkeypatch.setattr(Context, "use_threads", lambda context, n: (set_to.append(n), use(context, n))[1])
        assert engine.threads_in_use == 2
        text = engine.generate([1, 2, 3], max_tokens=60, policy="off")
        assert list(text)
        assert (1 in set_to) == adapts
        assert (engine.threads_in_use in (1, 2)) if adapts else engine.threads_in_use == 2


def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors, and every window is busy and short."""
    monkeypatch.setattr(cores, "usable_cpus", lambda: {0, 1})
    monkeypatch.setattr(cores, "cores", lambda *_: 2)
    monkeypatch.setattr("rest_local.calibration.threads.WINDOW_S", 0.0)
    monkeypatch.setattr(ThreadGovernor, "_is_delayed", lambda *_: True)


def test_exact_settings_whose_bits_depend_on_the_number_of_threads_keep_all_of_them(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logits are changed here if one thread computes them, so only all threads are exact."""
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    two_threads(monkeypatch)
    used: dict[int, int] = {}
    use, logits = Context.use_threads, Context.logits
    monkeypatch.setattr(Context, "use_threads", lambda context, n: (used.update({id(context): n}), use(context, n))[1])

    def changed(context: Context, n: int) -> np.ndarray:
        return logits(context, n) + np.float32(used.get(id(context), 2) == 1)

    monkeypatch.setattr(Context, "logits", changed)
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=256, exact=True) as engine:
        engine.compare(math.inf)
        assert engine.self_test["exact"]
        assert not engine.self_test["any_threads"]
        used.clear()
        assert list(engine.generate([1, 2, 3], max_tokens=60, policy="off"))
        assert 1 not in used.values()
        assert engine.threads_in_use == 2
