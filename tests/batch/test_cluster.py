"""Batches on a real Ray cluster of two nodes: the bytes of one machine, a node that is killed, going on, errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.batches import COMMAND, ENVIRONMENT, answers_of, write_requests
from support.ray_nodes import RayNodes, needs_ray

from rest_local.batch import cluster
from rest_local.batch.cluster import TRIES, Cluster, _share
from rest_local.batch.jobs import read_jobs
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.results import Timings
from rest_local.errors import ClusterFailed, OptionError
from rest_local.paths import demo_model

EXACT = ("-c", "256", "-t", "1", "--no-history", "--exact")
REQUESTS = 12
SECONDS = 300.0
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "cluster.md"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two that have errors."""
    source = write_requests(tmp_path_factory.mktemp("cluster") / "in.jsonl", REQUESTS - 2)
    with source.open("a") as file:
        file.write('no json\n{"prompt": "a", "temperature": "hot"}\n')
    return source


@pytest.fixture(scope="module")
def expected(requests: Path) -> dict[str, Any]:
    """The answers of one machine."""
    output = requests.with_name("expected.jsonl")
    done = subprocess.run([*COMMAND, str(requests), "-o", str(output), *EXACT], check=False, env=ENVIRONMENT)
    assert done.returncode == 1
    return undated(output)


def undated(output: Path) -> dict[str, Any]:
    """The lines by custom_id, as JSON text, without the time that they were made at."""
    found = answers_of(output)
    for line in found.values():
        (line["response"] or {"body": {}})["body"].pop("created", None)
    return {name: json.dumps(line) for name, line in found.items()}


def started(nodes: RayNodes, *arguments: str | Path, address: str = "") -> subprocess.Popen[str]:
    command = [*COMMAND, *map(str, arguments), *EXACT, "--ray", address or nodes.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=nodes.environment, text=True)


def wait_for_lines(process: subprocess.Popen[str], output: Path, count: int) -> None:
    end = time.monotonic() + SECONDS
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@needs_ray
def test_a_killed_driver_and_a_killed_node_cost_only_requests_in_flight(
    nodes: RayNodes, requests: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A batch whose driver was killed goes on where it stopped, and loses a node. All requests are answered, with the
    bytes of one machine, and nothing is written twice."""
    for attempt in range(3):  # until the node had requests in flight when it was killed
        if attempt:
            nodes.add_worker()
        output = tmp_path / f"out-{attempt}.jsonl"
        process = started(nodes, requests, "-o", output)
        wait_for_lines(process, output, 2)  # the first one is that of the line that is no request
        process.kill()
        process.communicate()
        kept = output.read_bytes().count(b"\n")
        process = started(nodes, requests, "-o", output, "--json", address="auto")
        nodes.kill_worker()
        out, errors = process.communicate(timeout=SECONDS)
        assert undated(output) == expected
        summary = json.loads(out)
        assert (summary["kept"], summary["answered"]) == (kept, REQUESTS - kept)
        *warnings, failed = errors.splitlines()
        lost = "rest-local: warning: a node or a replica was lost; "
        assert all(line.startswith(lost) and line.endswith(" requests are done again") for line in warnings), errors
        assert failed.startswith(f"rest-local: error: 2 of {REQUESTS} requests have an error")
        assert process.returncode == 1
        if warnings:
            return
    raise AssertionError("no request was in flight on any node that was killed")


@needs_ray
def test_a_replica_that_cannot_start_ends_the_batch_with_its_cause(nodes: RayNodes, tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 2)
    process = started(nodes, source, "-o", tmp_path / "out.jsonl", "--datastore", "no-such-datastore")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("rest-local: error: replica on ")
    assert "no-such-datastore" in line


@needs_ray
def test_the_commands_of_the_page_leave_nothing(tmp_path: Path) -> None:
    """A batch and a build with `local`, which starts Ray on loopback addresses, and ends it."""
    blocks = re.findall("^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [" --ray local" in block for block in blocks] == [True, True]
    shutil.copy(demo_model(), tmp_path / "model.gguf")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # as in `RayNodes`
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**ENVIRONMENT, "PATH": path, "RAY_TMPDIR": str(folder), "HOME": str(tmp_path)}
    for block in blocks:
        command = ["sh", "-euc", block]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stderr.splitlines()) <= 1, done.stderr
    assert len(answers_of(tmp_path / "answers.jsonl")) == 2
    assert not (tmp_path / ".ray").exists()  # a token in there would change how other programs connect
    end = time.monotonic() + SECONDS
    while str(folder) in subprocess.run(["ps", "-A", "-o", "args="], stdout=subprocess.PIPE, text=True).stdout:
        assert time.monotonic() < end, "processes of Ray are left"
        time.sleep(0.1)
    shutil.rmtree(folder)


def test_a_request_that_ends_its_replica_is_answered_with_an_error(
    requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are answered, and the batch ends. Ray loses the group of that request each time."""
    sizes: list[int] = []

    def stream(groups: Any, share: Any, setup: Any, *, alone: bool) -> Iterator[Any]:
        sizes.append(max(map(len, groups)))
        for group in groups:
            for job in group:
                if job.custom_id == "r3":
                    break  # what the replica had not answered of its group is lost
                yield job.number, {"response": {"status_code": 200}}, Timings()

    monkeypatch.setattr(cluster, "_stream", stream)
    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext())
    monkeypatch.setattr(cluster, "_share", lambda *_: cluster._Share(1, 0, 1))
    warnings: list[str] = []
    jobs = read_jobs(requests)
    answers = [*Cluster("auto").answers(jobs, EngineConfig(), warn=warnings.append)]
    assert sorted(answer.job.number for answer in answers) == [job.number for job in jobs]
    (lost,) = [answer for answer in answers if answer.job.error is None and not answer.ok]
    assert lost.job.custom_id == "r3"
    message = lost.record["response"]["body"]["error"]["message"]
    assert message.startswith(f"{TRIES} replicas ended while they answered this request")
    assert len(sizes) == TRIES
    assert sizes == sorted(sizes, reverse=True), "lost jobs go in smaller groups"
    assert sizes[-1] == 1
    assert len(warnings) == TRIES


def test_without_ray_the_error_names_the_extra(requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answers = Cluster("auto").answers(read_jobs(requests)[:1], EngineConfig())
    with pytest.raises(ClusterFailed, match=r"a cluster needs Ray .*; pip install 'rest-local\[ray\]'"):
        next(answers)


@needs_ray
def test_a_cluster_that_does_not_answer_is_one_line(requests: Path) -> None:
    """Of an address without a server, at once; Ray itself would try for many minutes."""
    done = subprocess.run(
        [*COMMAND, str(requests), "--ray", "127.0.0.1:1"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == ("rest-local: error: cluster 127.0.0.1:1: Connection refused; start it with `ray start`\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://head:10001"}, "a client outside the cluster cannot stream"),
        ({"address": "auto", "replicas": 0}, "replicas 0: give at least 1"),
        ({"address": "auto", "cpus": 0}, "cpus 0: give at least 1"),
        ({"address": "auto", "gpus": -1}, "gpus -1: give at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Cluster(**options)


@needs_ray
def test_the_cluster_of_the_documentation_is_one_of_ray() -> None:
    check = """
import re, sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
text = open(sys.argv[1], encoding="utf-8").read()
(found,) = re.findall(r"```yaml\\n(.*?)```", text, re.DOTALL)
validate_config(prepare_config(yaml.safe_load(found)))
"""
    subprocess.run([sys.executable, "-c", check, str(PAGE)], check=True, env=ENVIRONMENT)


def node(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": resources}


LOST: dict[str, Any] = {"Alive": False, "Resources": {"CPU": 64.0}}


@pytest.mark.parametrize(
    ("nodes_up", "options", "config", "expected_share"),
    [
        ([node(CPU=8.0), node(CPU=16.0), LOST], {}, {}, (8, 0, 3)),  # those of the smallest node
        ([node(CPU=8.0), node(CPU=16.0)], {}, {"threads": 4}, (4, 0, 6)),
        ([node(CPU=8.0), node(CPU=16.0)], {"cpus": 16}, {}, (16, 0, 1)),
        ([node(CPU=8.0), node(GPU=4.0, CPU=32.0)], {}, {}, (1, 1, 4)),
        ([node(GPU=4.0, CPU=2.0)], {}, {}, (1, 1, 2)),
        ([node(GPU=2.0, CPU=32.0)], {"gpus": 0.5}, {}, (1, 0.5, 4)),
        ([node(GPU=2.0, CPU=32.0)], {}, {"n_gpu_layers": 0}, (32, 0, 1)),
        ([node(GPU=2.0, CPU=32.0)], {"gpus": 0, "cpus": 8}, {}, (8, 0, 4)),
        ([node(CPU=1.0)], {"replicas": 9, "cpus": 4}, {}, (4, 0, 9)),  # nodes may come
        ([node(memory=1.0), node(CPU=4.0)], {}, {}, (4, 0, 1)),
    ],
)
def test_a_replica_gets_its_share_of_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
    nodes_up: list[dict[str, Any]],
    options: dict[str, Any],
    config: dict[str, Any],
    expected_share: tuple[int, float, int],
) -> None:
    """CPUs, GPUs and the number of replicas. Only what Ray says about its nodes is made up."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes_up))
    share = _share(Cluster("auto", **options), EngineConfig(**config))
    assert (share.cpus, share.gpus, share.count) == expected_share


def test_replicas_that_no_node_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [node(CPU=8.0), LOST]))
    with pytest.raises(ClusterFailed, match="no node of the cluster has 64 CPUs for a replica; give fewer "):
        _share(Cluster("auto", cpus=64), EngineConfig())
