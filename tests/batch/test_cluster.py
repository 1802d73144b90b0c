"""Batches on a cluster: shares of its nodes, errors. `retrieval/test_clusters.py` runs them on real nodes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.batches import ENVIRONMENT, with_errors
from support.ray_nodes import needs_ray
from support.toy import demo_model

from rest_local.batch import cluster
from rest_local.batch.cluster import TRIES, Cluster, _share
from rest_local.batch.jobs import read_jobs
from rest_local.cluster import Lost
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.results import Timings
from rest_local.errors import ClusterFailed, OptionError

REQUESTS = 12
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "cluster.md"


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Write requests of which two have errors."""
    return with_errors(tmp_path / "in.jsonl", REQUESTS)


class FakeRay:
    """Replicas of a cluster without processes, which run one after the other and are lost with the request `r3`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: self.replica()))

    def replica(self) -> Any:
        def task(run: Any) -> Any:
            return SimpleNamespace(remote=run, options=lambda **_: SimpleNamespace(remote=run))

        return SimpleNamespace(begin=task(lambda: iter(())), answers=task(self.answers), close=task(lambda: None))

    def answers(self, jobs: list[Any]) -> Iterator[Any]:
        self.sizes.append(len(jobs))
        for job in jobs:
            if job.custom_id == "r3":
                raise Lost("its process ended")
            yield [(job.number, {"response": {"status_code": 200}}, Timings())]

    def wait(self, tasks: Any, **_: Any) -> None: ...
    def kill(self, replica: Any) -> None: ...


def test_a_request_that_ends_its_replica_is_answered_with_an_error(
    requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are answered, and the batch ends."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "ready", lambda tasks: next(iter(tasks)))
    monkeypatch.setattr(cluster, "messages_of", lambda task, where: task)
    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext())
    monkeypatch.setattr(cluster, "_share", lambda *_: cluster._Share(1, 0, 1))
    monkeypatch.setattr(cluster, "GROUPS_PER_REPLICA", 1)
    warnings: list[str] = []
    jobs = read_jobs(requests)
    answers = [*Cluster("auto").answers(jobs, EngineConfig(model=demo_model()), warn=warnings.append)]
    assert sorted(answer.job.number for answer in answers) == [job.number for job in jobs]
    (lost,) = [answer for answer in answers if answer.job.error is None and not answer.ok]
    assert lost.job.custom_id == "r3"
    message = lost.record["response"]["body"]["error"]["message"]
    assert message.startswith(f"{TRIES} replicas ended while they answered this request")
    assert ray.sizes == sorted(ray.sizes, reverse=True), "lost jobs go in smaller groups"
    assert ray.sizes[-1] == 1
    assert len(warnings) == TRIES - 1


def test_without_ray_the_error_names_the_extra(requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answers = Cluster("auto").answers(read_jobs(requests)[:1], EngineConfig(model=demo_model()))
    with pytest.raises(ClusterFailed, match=r"a cluster needs Ray .*; pip install 'rest-local\[ray\]'"):
        next(answers)


def test_a_cluster_that_does_not_answer_is_one_line(requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes at once for an address without a server. Ray itself would try for many minutes."""
    unconnected = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", unconnected)
    answers = Cluster("127.0.0.1:1").answers(read_jobs(requests)[:1], EngineConfig(model=demo_model()))
    with pytest.raises(ClusterFailed, match=r"^cluster 127\.0\.0\.1:1: Connection refused; start it with `ray start`$"):
        next(answers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://head:10001"}, "a client outside the cluster cannot stream"),
        ({"address": "auto", "replicas": 0}, "replicas 0: give at least 1"),
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
        ([node(CPU=8.0), node(CPU=16.0)], {}, {"threads": 16}, (16, 0, 1)),
        ([node(CPU=8.0), node(GPU=4.0, CPU=32.0)], {}, {}, (1, 1, 4)),
        ([node(GPU=4.0, CPU=2.0)], {}, {}, (1, 1, 2)),
        ([node(GPU=2.0, CPU=32.0)], {"gpus": 0.5}, {}, (1, 0.5, 4)),
        ([node(GPU=2.0, CPU=32.0)], {}, {"n_gpu_layers": 0}, (32, 0, 1)),
        ([node(GPU=2.0, CPU=32.0)], {"gpus": 0}, {"threads": 8}, (8, 0, 4)),
        ([node(CPU=1.0)], {"replicas": 9}, {"threads": 4}, (4, 0, 9)),  # nodes may come
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
    share = _share(Cluster("auto", **options), EngineConfig(model=demo_model(), **config))
    assert (share.cpus, share.gpus, share.count) == expected_share


def test_replicas_that_no_node_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [node(CPU=8.0), LOST]))
    with pytest.raises(ClusterFailed, match="no node of the cluster has 64 CPUs for a replica; give fewer "):
        _share(Cluster("auto"), EngineConfig(model=demo_model(), threads=64))
