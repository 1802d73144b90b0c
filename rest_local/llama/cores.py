"""Find the number of threads that pay, and set how llama.cpp's threads wait for each other.

Contract:

- `default_threads` counts the physical performance cores that this process may use. Its sources are, on Linux, the
  affinity mask, `/sys/devices/system/cpu` and the CPU quota of the control group; on macOS `sysctl`. It never fails:
  missing information is ignored. Two hardware threads of one core share its arithmetic units, and llama.cpp's threads
  wait for the slowest. So a second thread on a core gains nothing, and a slow core costs more than it adds.
- `set_spin_defaults` lets waiting threads spin for a moment before they sleep. Between the operations of a forward
  pass every thread waits for the slowest, some hundred times. A thread that sleeps at once loses the time to wake up
  each time. A thread that spins for long takes the CPU from the thread that it waits for, if other programs run too.
- `wait_briefly` lets them sleep almost at once while other programs run. The bits of the logits stay the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

ROOT = Path("/")
# A performance core has at least this share of the capacity of the fastest core. Efficiency cores have 0.2 to 0.6 of
# it. Cores of one kind that may run at different clocks (favoured cores) stay above 0.85.
FAST = 0.75

# Number of turns before a thread sleeps. The default of GNU's OpenMP runtime is 300 000, about 5 ms. Measured on 2
# cores with a model of 0.8 ms a step (docs/LOG.md): on a quiet machine nothing is lost from 10 000 on (3000 cost a
# tenth of the speed, sleeping at once two thirds). On a busy one 300 000 sometimes fell to 0.001 of the speed. LLVM's
# runtime, in a llama.cpp that clang built, yields the CPU while it spins; no KMP_BLOCKTIME was better than its default.
SPIN = 30_000

LOOK_S = 0.5  # seconds of forward passes between two looks of a running engine, which take 1 ms on a quiet machine
LOOKS = 3
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def default_threads() -> int:
    """Return the number of threads to decode with: the performance cores that this process may use, at least one. On
    other systems than Linux and macOS, these are all processors. Takes 0.1 ms for each core.
    """
    if platform.system() == "Darwin":
        return _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    return cores(usable_cpus())


def usable_cpus() -> set[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores(usable: set[int], root: Path = ROOT) -> int:
    """Count the performance cores among these processors, at most as many as the quota allows."""
    places = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}" for cpu in usable}
    capacities = {  # relative to other processors; 0 if unknown
        cpu: _number(place / "cpu_capacity") or _number(place / "cpufreq/cpuinfo_max_freq") or 0
        for cpu, place in places.items()
    }
    known = all(capacities.values())
    fastest = max(capacities.values(), default=0)
    fast = [cpu for cpu in usable if not known or capacities[cpu] >= FAST * fastest]
    if efficient := _cpu_list(_text(root / "sys/devices/cpu_atom/cpus")) & usable:
        fast = [cpu for cpu in fast if cpu not in efficient] or fast
    physical = {_siblings(places[cpu]) or str(cpu) for cpu in fast}
    quota = _quota(root)
    return max(1, min(len(physical), quota) if quota else len(physical))


def _siblings(place: Path) -> str:
    """Return the hardware threads of the processor's core, as the same text for each of them; empty if unknown."""
    return _text(place / "topology/core_cpus_list") or _text(place / "topology/thread_siblings_list")


def _quota(root: Path) -> int:
    """Return the CPU quota of this process's control groups in processors, rounded up; 0 without a limit."""
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    allowed: list[float] = []
    for _, controllers, group in (parts for parts in groups if len(parts) == 3):
        base = root / "sys/fs/cgroup" / ("cpu" if "cpu" in controllers.split(",") else "")
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):  # all parent groups have limits too
            place = base.joinpath(*parts[:depth])
            period, used = _number(place / "cpu.cfs_period_us"), _number(place / "cpu.cfs_quota_us")
            whole = _text(place / "cpu.max").split()
            if len(whole) == 2 and all(part.isdecimal() for part in whole):
                used, period = int(whole[0]), int(whole[1])
            if used > 0 and period > 0:
                allowed.append(used / period)
    return max(1, -int(-min(allowed) // 1)) if allowed else 0


def _cpu_list(text: str) -> set[int]:
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
    """Return a number from macOS's sysctl, or 0 if it is unknown."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    text = done.stdout.strip()
    return int(text) if text.isdecimal() else 0


def set_spin_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the spin count of GNU's OpenMP runtime, unless the user has set a variable about waiting. Call it before
    llama.cpp is loaded, because the runtime reads the variable when it is loaded.
    """
    if any(name in environment for name in _WAIT_VARIABLES):
        return
    environment["GOMP_SPINCOUNT"] = str(SPIN)


def spin_settings() -> str:
    """Return the variables in effect, for `doctor`."""
    found = " ".join(f"{name}={os.environ[name]}" for name in _WAIT_VARIABLES if name in os.environ)
    return found or "the runtime's own"


def others_run(root: Path = ROOT) -> bool:
    """Return True if other threads of the machine keep at least half of the usable processors busy, in each of LOOKS
    looks 1 ms apart. Return False if the system does not tell; Linux does, in `/proc/loadavg`.

    Threads of this process count as well, for example those that still spin after a forward pass.
    """
    for look in range(LOOKS):
        time.sleep(1e-3 * (look > 0))
        running, _, _ = " ".join(_text(root / "proc/loadavg").split()[3:4]).partition("/")
        if not running.isdecimal() or 2 * (int(running) - 1) < len(usable_cpus()):
            return False
    return True


def can_wait_briefly() -> bool:
    """Return True if `wait_briefly` works: with GNU's OpenMP, and no variable about waiting. Loads llama.cpp."""
    if os.environ.get("GOMP_SPINCOUNT") != str(SPIN) or "OMP_WAIT_POLICY" in os.environ:
        return False
    from rest_local.llama.loaded import bindings

    # LLVM's runtime offers this function too, but spins as long as before.
    return hasattr(bindings._lib, "GOMP_parallel") and not hasattr(bindings._lib, "kmp_set_blocktime")


def release_team() -> None:
    """End the threads that OpenMP keeps for the calling thread. Call it in a thread that has computed and lives on.
    Takes 0.1 ms, and as much again when the thread computes after all.

    GNU's runtime counts the threads of every team. If they are more than the processors, waiting ones sleep after 100
    turns: a step of SmolLM2 on 2 cores took 12 ms in place of 8 while the thread lived that had loaded the model.
    """
    from rest_local.llama.loaded import bindings

    if hasattr(bindings._lib, "GOMP_parallel") and hasattr(bindings._lib, "omp_pause_resource_all"):
        bindings._lib.omp_pause_resource_all(_PAUSE_SOFT)


def wait_briefly(brief: bool) -> None:
    """Let the waiting threads of this process sleep after 100 turns (some us) from now on, or after SPIN turns again.

    The runtime spins so briefly while it has more threads than processors (see GOMP_SPINCOUNT in its manual). So this
    starts as many sleeping ones, or ends them. Takes 0.1 ms, or nothing if nothing changes. Any thread may call it.
    """
    global _idle_team
    with _waiting:
        if brief == (_idle_team is not None) or not can_wait_briefly():
            return
        if _idle_team is None:
            _idle_team = _IdleTeam()
        else:
            _idle_team.end()
            _idle_team = None


class _IdleTeam:
    """A team of sleeping OpenMP threads, one more than there are processors. A thread of Python is its first."""

    def __init__(self) -> None:
        self._started, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="brief waits", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        from rest_local.llama.loaded import bindings

        parallel = bindings._lib.GOMP_parallel
        parallel.restype, parallel.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)  # Each thread calls it without Python.
        parallel(nothing, None, len(usable_cpus()) + 1, 0)
        self._started.set()
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


_PAUSE_SOFT = 1  # The value of `omp_pause_soft` in OpenMP's headers.
_waiting = threading.Lock()
_idle_team: _IdleTeam | None = None
