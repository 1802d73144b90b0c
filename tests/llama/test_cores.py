"""The number of threads for scripted trees of /sys and /proc, and the variables that decide how threads wait."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.llama import cores as module
from rest_local.llama.cores import SPIN, cores, others_run


def machine(
    root: Path,
    siblings: list[str],
    capacity: list[int] | None = None,
    frequency: list[int] | None = None,
    old: bool = False,
) -> Path:
    """Pretend to be a machine. `siblings` has for each processor the hardware threads of its core."""
    for cpu, text in enumerate(siblings):
        place = root / f"sys/devices/system/cpu/cpu{cpu}"
        (place / "topology").mkdir(parents=True)
        (place / "topology" / ("thread_siblings_list" if old else "core_cpus_list")).write_text(text + "\n")
        if capacity:
            (place / "cpu_capacity").write_text(f"{capacity[cpu]}\n")
        if frequency:
            (place / "cpufreq").mkdir()
            (place / "cpufreq/cpuinfo_max_freq").write_text(f"{frequency[cpu]}\n")
    return root


def quota(root: Path, group: str, version: int = 2, **files: str) -> None:
    process = root / "proc/self"
    process.mkdir(parents=True, exist_ok=True)
    controllers = "0:" if version == 2 else "4:cpu,cpuacct"
    (process / "cgroup").write_text(f"{controllers}:/a/b\n")
    place = root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / group
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize("old", [False, True])
def test_hardware_threads_of_one_core_count_once(tmp_path: Path, old: bool) -> None:
    root = machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, old=old)
    assert cores(set(range(8)), root) == 4
    assert cores({0, 4}, root) == 1
    assert cores({0, 1, 4}, root) == 2


def test_efficiency_cores_do_not_count(tmp_path: Path) -> None:
    """An Intel hybrid by the kernel's list: 2 performance cores of two threads, 4 efficiency cores."""
    root = machine(tmp_path, ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"])
    (root / "sys/devices/cpu_atom").mkdir(parents=True)
    (root / "sys/devices/cpu_atom/cpus").write_text("4-7\n")
    assert cores(set(range(8)), root) == 2
    assert cores({4, 5, 6}, root) == 3  # they count if no other core may be used


@pytest.mark.parametrize(
    ("group", "version", "files", "expected"),
    [
        ("a/b", 2, {"cpu__max": "300000 100000"}, 3),
        ("a/b", 2, {"cpu__max": "150000 100000"}, 2),
        ("a/b", 2, {"cpu__max": "1000 100000"}, 1),
        ("a/b", 2, {"cpu__max": "max 100000"}, 8),
        ("a", 2, {"cpu__max": "200000 100000"}, 2),
        ("", 2, {"cpu__max": "200000 100000"}, 2),
        ("a/b", 1, {"cpu__cfs_quota_us": "250000", "cpu__cfs_period_us": "100000"}, 3),
        ("a/b", 1, {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, 8),
        ("a/b", 2, {"cpu__max": "nonsense"}, 8),
        ("a/b", 2, {"cpu__max": "900000 100000"}, 8),
    ],
)
def test_the_quota_of_the_control_group_is_a_limit(
    tmp_path: Path, group: str, version: int, files: dict[str, str], expected: int
) -> None:
    root = machine(tmp_path, [str(n) for n in range(8)])
    quota(root, group, version, **files)
    assert cores(set(range(8)), root) == expected


def test_the_variable_is_set_before_the_library_is_loaded() -> None:
    """Any module may be imported first."""
    program = """
import importlib.abc, json, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "llama_cpp":
            print(json.dumps(os.environ.get("GOMP_SPINCOUNT")))
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
import rest_local.llama.context
"""
    set_by_a_parent = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # the last by llama.cpp itself
    clean = {name: text for name, text in os.environ.items() if name not in set_by_a_parent}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean, check=True)
    assert json.loads(done.stdout) == str(SPIN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.50 0.40 0.30 1/300 4000", False),  # this thread
        ("0.50 0.40 0.30 2/300 4000", False),
        ("0.00 0.00 0.00 3/300 4000", True),
        ("9.00 9.00 9.00 40/300 4000", True),
        ("", False),
        ("0.50 0.40", False),
        ("0.50 0.40 0.30 none 4000", False),
    ],
)
def test_others_run_where_half_of_four_processors_are_wanted(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: {0, 1, 2, 3})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(text)
    assert others_run(tmp_path) is expected
    assert not others_run(tmp_path / "nowhere")


BRIEF = """
import json, os, sys, threading, time
import numpy as np
from rest_local.llama import cores
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

def threads():
    return len(os.listdir("/proc/self/task"))

if not cores.can_wait_briefly():
    print(json.dumps(None))
    sys.exit()
with Model.open(sys.argv[1]) as model, Context(model, ContextSettings(n_ctx=64, threads=2)) as context:
    counts, rows = [], []
    for brief in (False, True, True, False, True, False):
        cores.wait_briefly(brief)
        context.clear()
        context.batch.fill(range(1, 9), np.arange(8), 0, 1, 1)
        assert context.decode() == 0
        rows.append(context.logits(8).tobytes())
        over = time.monotonic() + 60  # a thread that ends is counted a moment longer
        while not brief and threads() != (counts or [threads()])[0] and time.monotonic() < over:
            time.sleep(0.001)
        counts.append(threads())
    print(json.dumps([counts, len(set(rows)), len(cores.usable_cpus())]))
"""


def test_threads_wait_briefly_while_there_are_more_than_processors_and_compute_the_same(
    tiny_model: Callable[..., Path],
) -> None:
    """GNU's OpenMP runtime goes by the number of its threads."""
    clean = {name: text for name, text in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", BRIEF, str(tiny_model("llama", quant="Q8_0"))]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=True)
    found = json.loads(done.stdout)
    if found is None:
        pytest.skip("this llama.cpp does not use GNU's OpenMP runtime")
    counts, different, processors = found
    first = counts[0]
    more = first + processors + 1
    assert counts == [first, more, more, first, more, first]
    assert different == 1


LOADED = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from rest_local import Engine
from rest_local.llama.loaded import bindings
if not hasattr(bindings._lib, "omp_pause_resource_all"):
    print("null")
    sys.exit()
native = lambda: len(os.listdir("/proc/self/task")) - threading.active_count()
with ThreadPoolExecutor(1) as pool:
    others = native()
    engine = pool.submit(lambda: Engine.load(sys.argv[1], n_ctx=512, threads=2, history=False)).result()
    loaded = native()
    list(engine.generate([1, 2, 3], max_tokens=4))  # this thread has its own team of two from now on
    print(json.dumps([loaded - others, native() - others]))
"""


def test_a_thread_that_has_loaded_a_model_keeps_no_openmp_threads(tiny_model: Callable[..., Path]) -> None:
    """They would count, and those of the thread that decodes would sleep after each operation."""
    command = [sys.executable, "-c", LOADED, str(tiny_model("llama", quant="Q8_0"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    if found is None:
        pytest.skip("this llama.cpp does not use an OpenMP runtime that can be paused")
    assert found == [0, 1]
