"""A Ray cluster of several nodes on this machine, on loopback addresses, whose nodes can be killed.

The nodes belong to a process of their own (this file), so that a test process loads nothing of Ray, and nothing is left
when it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

STORE_BYTES = 100_000_000  # Ray takes no less than 75 MB
SECONDS = 120.0
PROC = Path("/proc")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'rest-local[ray]'")


class RayNodes:
    """A head and a worker node, each with one CPU. A context manager. `environment`: for processes that connect."""

    def __init__(self) -> None:
        # Ray's sockets are in here: their paths may have 107 bytes, so the folder of a test is too long.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # else a token in the home directory counts for `auto`
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the name is misleading: addresses are then of loopback
            # A node that is gone refuses five looks within a second instead of 15; one that is slow has 10 s for each.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "200",
        }
        with (self._folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=self.environment, start_new_session=True, text=True,
            )  # fmt: skip
        try:
            self.address = self._line()
        except BaseException:
            self.close()
            raise

    def kill_worker(self, driver: subprocess.Popen[str]) -> None:
        """Kill the worker node with SIGKILL, once a new replica on it has opened its model for a request, or the driver
        has ended: replicas of a driver that was killed may still live, and leave no room for new ones.
        """
        self._ask("watch")
        while driver.poll() is None and self._ask("works?") == "no":
            time.sleep(0.02)
        self.kill_worker_now()

    def kill_worker_now(self) -> None:
        """Kill the worker node with SIGKILL, whatever it does."""
        self._ask("kill")

    def add_worker(self) -> None:
        """Start another worker node in the place of one that was killed; nothing where none was."""
        self._ask("add")

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the cluster ended: {(self._folder / 'errors').read_text('utf-8')[-3000:]}")
        return line.strip()

    def close(self) -> None:
        """End all nodes; no process of theirs is left."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        end = time.monotonic() + SECONDS
        while left := processes_of(self._process.pid):
            assert time.monotonic() < end, f"processes of Ray are left: {left}"
            for process in left:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self._folder)

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,stat="], stdout=subprocess.PIPE, check=True, text=True).stdout
    found = []
    for pid, state in map(str.split, listed.splitlines()):
        with suppress(ProcessLookupError, PermissionError):
            if not state.startswith("Z") and os.getsid(int(pid)) == session:
                found.append(int(pid))
    return found


def _serve() -> None:
    """Run the process of the nodes."""
    import ray
    from ray._private.state import actors
    from ray.cluster_utils import Cluster

    own = os.dup(1)
    os.dup2(2, 1)  # what Ray prints
    settings = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False, "no_monitor": True})
    nodes, killed, before = [cluster.add_node(**settings)], set[str](), set[str]()
    cluster.wait_for_nodes(timeout=SECONDS)
    ray.init(cluster.address, log_to_driver=False)
    os.write(own, f"{cluster.address}\n".encode())
    for line in sys.stdin:
        answer = "done"
        if line == "watch\n":
            before = set(actors())
        elif line == "works?\n":
            answer = "yes" if _works(nodes[-1].node_id, before) else "no"
        elif line == "add\n":
            while not nodes and any(node["Alive"] and node["NodeID"] in killed for node in ray.nodes()):
                time.sleep(0.1)  # it would be counted as one with room for a task
            nodes = nodes or [cluster.add_node(**settings)]
            cluster.wait_for_nodes(timeout=SECONDS)
        else:
            node = nodes.pop()
            killed.add(node.node_id)
            cluster.remove_node(node, allow_graceful=False)
        os.write(own, f"{answer}\n".encode())


def _works(node: str, before: set[str]) -> bool:
    """Return True if a replica on the node has loaded the model, or without /proc if it lives."""
    from ray._private.state import actors

    for name, actor in actors().items():
        if name not in before and actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == node:
            maps = PROC / str(actor["Pid"]) / "maps"
            return not PROC.is_dir() or b".gguf" in maps.read_bytes()
    return False


if __name__ == "__main__":
    _serve()
