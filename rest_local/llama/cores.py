"""How many threads pay: the physical cores this process may use, without efficiency cores and hardware threads.

Contract: reads what the system tells (Linux: the affinity mask, `/sys/devices/system/cpu`, the processor quota of the
control group; macOS: `sysctl`), and never fails: what is not told is not taken into account. Two hardware threads of
one core share its arithmetic units, and llama.cpp's threads wait for the slowest, so a second one on a core gains
nothing, and a slow core costs more than it adds.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path("/")
FAST = 0.75
"""Of the capacity of the fastest core: what counts as a performance core. Efficiency cores have 0.2 to 0.6 of it, while
cores of one kind that may run at different clocks (favoured cores) stay above 0.85."""


def default_threads(root: Path = ROOT) -> int:
    """Threads to decode with: performance cores this process may use, one or more. `root`: where `sys` and `proc` are.

    Linux and macOS; elsewhere all processors. Takes 0.1 ms a core.
    """
    if platform.system() == "Darwin":
        return _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    return cores(usable_cpus(), root)


def usable_cpus() -> set[int]:
    """Numbers of the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores(usable: set[int], root: Path = ROOT) -> int:
    """Of these processors the performance cores, each counted once, and no more than the quota allows."""
    places = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}" for cpu in usable}
    capacities = {cpu: _capacity(place) for cpu, place in places.items()}
    known = all(capacities.values())
    fastest = max(capacities.values(), default=0)
    fast = [cpu for cpu in usable if not known or capacities[cpu] >= FAST * fastest]
    if efficient := _efficient(root) & usable:
        fast = [cpu for cpu in fast if cpu not in efficient] or fast
    physical = {_siblings(places[cpu]) or str(cpu) for cpu in fast}
    quota = _quota(root)
    return max(1, min(len(physical), quota) if quota else len(physical))


def _capacity(place: Path) -> int:
    """How much the processor computes, relative to others of the machine; 0 where it is not told."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        if number := _number(place / name):
            return number
    return 0


def _efficient(root: Path) -> set[int]:
    """Efficiency cores of a hybrid Intel processor, by the kernel's own list."""
    return _cpu_list(_text(root / "sys/devices/cpu_atom/cpus"))


def _siblings(place: Path) -> str:
    """The hardware threads of the processor's core, the same text for all of them; empty where it is not told."""
    return _text(place / "topology/core_cpus_list") or _text(place / "topology/thread_siblings_list")


def _quota(root: Path) -> int:
    """Processors' worth of time that the control groups of this process allow, rounded up; 0: no limit."""
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    allowed: list[float] = []
    for _, controllers, group in (parts for parts in groups if len(parts) == 3):
        base = root / "sys/fs/cgroup" / ("cpu" if "cpu" in controllers.split(",") else "")
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):  # a limit of any group above holds as well
            place = base.joinpath(*parts[:depth])
            period, used = _number(place / "cpu.cfs_period_us"), _number(place / "cpu.cfs_quota_us")
            whole = _text(place / "cpu.max").split()
            if len(whole) == 2 and all(part.isdecimal() for part in whole):
                used, period = int(whole[0]), int(whole[1])
            if used > 0 and period > 0:
                allowed.append(used / period)
    return max(1, -int(-min(allowed) // 1)) if allowed else 0


def _cpu_list(text: str) -> set[int]:
    """Of "0-3,8,10-11"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> int:
    """A number of macOS's; 0 where it is not known."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    text = done.stdout.strip()
    return int(text) if text.isdecimal() else 0
