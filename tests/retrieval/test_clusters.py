"""Batches and builds on a real Ray cluster of two nodes: the bytes of one machine, whatever is killed, changed or
missing. One cluster for all, because its start takes as long as a test."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ray_build
from support.batches import COMMAND, ENVIRONMENT, answers_of, with_errors, write_requests
from support.ray_nodes import RayNodes, needs_ray
from support.toy import demo_model

from rest_local import __version__
from rest_local.errors import ClusterFailed, OptionError
from rest_local.retrieval import Datastore, build_datastore
from rest_local.retrieval.building.cluster import SAMPLE, TRIES, Cluster, Shipped, _opened, _tokenized
from rest_local.retrieval.documents import Text
from rest_local.retrieval.home import read_manifest

SECONDS = 300.0
EXACT = ("-c", "256", "-t", "1", "--no-history", "--exact")
REQUESTS = 12
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "cluster.md"
FILES = 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


# ---- Batches -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_errors(tmp_path_factory.mktemp("cluster") / "in.jsonl", REQUESTS)


@pytest.fixture(scope="module")
def expected(requests: Path) -> dict[str, Any]:
    """Return the answers of one machine."""
    output = requests.with_name("expected.jsonl")
    done = subprocess.run([*COMMAND, str(requests), "-o", str(output), *EXACT], check=False, env=ENVIRONMENT)
    assert done.returncode == 1
    return undated(output)


def undated(output: Path) -> dict[str, Any]:
    """Return the lines by custom_id, as JSON text, without the time of their making."""
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
    for attempt in range(6):  # until the node had requests in flight when it was killed
        nodes.add_worker()
        output = tmp_path / f"out-{attempt}.jsonl"
        process = started(nodes, requests, "-o", output)
        wait_for_lines(process, output, 2)  # the first one is that of the line that is no request
        process.kill()
        process.communicate()
        kept = output.read_bytes().count(b"\n")
        process = started(nodes, requests, "-o", output, "--json", address="auto")
        nodes.kill_worker(process)
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
    process = started(
        nodes, source, "-o", tmp_path / "out.jsonl", "--datastore", "no-such-datastore", "--replicas", "1"
    )
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("rest-local: error: replica on ")
    assert "no-such-datastore" in line


@needs_ray
def test_the_commands_of_the_page_leave_nothing(nodes: RayNodes, tmp_path: Path) -> None:
    """A batch, here on the nodes that there are; and a build with `local`, which starts Ray on loopback addresses, and
    ends it."""
    batch, build = re.findall("^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [" --ray local" in block for block in (batch, build)] == [True, True]
    model = shutil.copy(demo_model(), tmp_path / "model.gguf")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # `RayNodes` has its folder there too.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = [
        subprocess.Popen(
            ["sh", "-euc", block.replace("--ray local", f"--ray {ray}")], cwd=tmp_path,
            env=variables | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for block, ray, variables in (
            (batch.replace("model.gguf", str(model)), nodes.address, nodes.environment),
            (build, "local", ENVIRONMENT | {"RAY_TMPDIR": str(folder), "HOME": str(tmp_path)}),
        )
    ]  # fmt: skip
    for process in running:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert len(errors.splitlines()) <= 1, errors
    assert len(answers_of(tmp_path / "answers.jsonl")) == 2
    assert not (tmp_path / ".ray").exists()  # a token in there would change how other programs connect
    end = time.monotonic() + SECONDS
    while str(folder) in subprocess.run(["ps", "-A", "-o", "args="], stdout=subprocess.PIPE, text=True).stdout:
        assert time.monotonic() < end, "processes of Ray are left"
        time.sleep(0.1)
    shutil.rmtree(folder)


# ---- Builds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 24 files of some 14 KB."""
    folder = tmp_path_factory.mktemp("cluster") / "source"
    folder.mkdir()
    numbers = random.Random(5)
    for number in range(FILES):
        lines = [f"value_{numbers.randrange(1000)} = {numbers.random()}\n" for _ in range(400)]
        path = folder / f"f{number:02}.py"
        path.write_text("".join(lines))
    (folder / "empty.py").write_text("")
    (folder / "binary.py").write_bytes(b"a\0b")
    (folder / "z_copy.py").write_bytes((folder / "f03.py").read_bytes())
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # long ago, so that the time of change is certain
    return folder


class Builds:
    """Builds of one test, in processes."""

    def __init__(self, nodes: RayNodes, source: Path, folder: Path) -> None:
        self.nodes, self.source, self.store, self.control = nodes, source, folder / "store", folder / "control"
        self.control.mkdir(parents=True)

    def command(self, ray: str | None = None) -> list[str]:
        script = [sys.executable, ray_build.__file__, str(self.control)]
        given = [str(self.source), "-o", str(self.store), "--json", "--replace"]
        return [*script, *given, *(["--ray", ray or self.nodes.address] if ray != "" else [])]

    def started(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(), stdout=pipe, stderr=pipe, env=self.nodes.environment, text=True)

    def ended(self, process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the report and the lines on stderr of a build that succeeds."""
        out, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        return json.loads(out), errors.splitlines()

    def failed(self, process: subprocess.Popen[str], code: int = 1) -> str:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == code, errors
        return errors

    def wait(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)

    def held(self) -> list[str]:
        """List the nodes on which tasks wait."""
        return [name.name.split("-")[1] for name in self.control.glob("held-*")]


@pytest.fixture
def builds(nodes: RayNodes, source: Path, tmp_path: Path) -> Builds:
    return Builds(nodes, source, tmp_path)


@pytest.fixture(scope="module")
def local(nodes: RayNodes, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a datastore locally."""
    return built_here(Builds(nodes, source, tmp_path_factory.mktemp("local")))


def built_here(builds: Builds) -> Path:
    command = builds.command(ray="")
    subprocess.run(command, env=builds.nodes.environment, check=True, stdout=subprocess.PIPE, timeout=SECONDS)
    return builds.store


def is_whole(builds: Builds, local: Path) -> None:
    """Check that the datastore is that of a local build, in every byte but the names of segments."""
    manifests = [read_manifest(each) for each in (builds.store, local)]
    segments = [[replace(entry, name="") for entry in manifest.segments] for manifest in manifests]
    assert segments[0] == segments[1], "with the checksums of all files"
    assert manifests[0].recipe == manifests[1].recipe
    with Datastore.open(builds.store) as store:
        store.check()


@needs_ray
def test_a_killed_node_costs_only_its_tasks_and_an_interrupt_leaves_the_old_commit(builds: Builds, local: Path) -> None:
    """Each of the two nodes tokenizes when one of them is killed."""
    builds.nodes.add_worker()
    (builds.control / "hold").write_text("value")
    process = builds.started()
    builds.wait(process, lambda: len(set(builds.held())) == 2)
    builds.nodes.kill_worker_now()
    (builds.control / "hold").unlink()
    report, errors = builds.ended(process)
    assert errors == []
    assert (report["segments"], report["documents"], report["skipped"]) == (1, FILES, {"empty": 1, "binary": 1})
    is_whole(builds, local)
    for held in builds.control.glob("held-*"):
        held.unlink()
    (builds.control / "hold").write_text("value")
    process = builds.started()
    builds.wait(process, lambda: bool(builds.held()))
    process.send_signal(signal.SIGINT)
    assert builds.failed(process, code=130) == ""
    is_whole(builds, local)


@needs_ray
def test_a_process_that_dies_is_replaced_and_a_text_that_always_kills_ends_the_build(
    builds: Builds, local: Path
) -> None:
    line = (builds.source / "f00.py").read_text().partition("\n")[0]
    (builds.control / "die-1").write_text(line)
    assert builds.ended(builds.started())[1] == []
    assert not list(builds.control.glob("die-*"))
    is_whole(builds, local)
    for number in range(TRIES):
        (builds.control / f"die-{number}").write_text(line)
    errors = builds.failed(builds.started()).splitlines()
    assert errors[-1].startswith(f"rest-local: error: {TRIES} processes ended while they tokenized the text after ")
    assert str(builds.source / "f00.py") in errors[-1]
    is_whole(builds, local)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": "0.0"}, "has rest-local .* and the driver 0.0; install the same"),
        ({"sample": np.zeros(3, np.int32)}, "tokenizes in another way than the driver"),
    ],
)
def test_a_node_with_another_library_is_named(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    vocabulary: Any = ray_build.Bytes(tmp_path)
    shipped = Shipped("b0" * 32, vocabulary.ship(), vocabulary.tokenize(SAMPLE), __version__)
    (tokens,) = _tokenized([Text("a", "text")], shipped)
    assert bytes(tokens) == b"".join(byte.to_bytes(4, "little") for byte in b"text")
    _opened.clear()
    answer = _tokenized([Text("a", "text")], shipped._replace(**change))
    assert re.match(f"node {re.escape(socket.gethostname())}: {what}", str(answer))


def test_without_ray_the_error_names_the_extra(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    vocabulary: Any = ray_build.Bytes(tmp_path)
    with pytest.raises(ClusterFailed, match=r"a cluster needs Ray .*; pip install 'rest-local\[ray\]'"):
        build_datastore(tmp_path / "store", [source], vocabulary=vocabulary, cluster=Cluster("auto"))
    assert not (tmp_path / "store").exists()


def test_a_client_outside_the_cluster_is_refused() -> None:
    with pytest.raises(OptionError, match="a client outside the cluster cannot stream"):
        Cluster("ray://head:10001")
