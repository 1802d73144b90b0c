"""How many requests of a batch at a time: what fits the memory, and what a file says."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy import demo_model

from rest_local.batch import worker
from rest_local.batch.jobs import Job, read_stream
from rest_local.batch.worker import MOST_ON_CPU, cells_of, fitted, room_for
from rest_local.decoding import opening
from rest_local.decoding.config import EngineConfig
from rest_local.llama.options import ModelOptions


def jobs_of(count: int, **body: Any) -> list[Job]:
    line = json.dumps({"prompt": "x" * 90, **body}).encode() + b"\n"
    return read_stream(io.BytesIO(count * line), "test")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the free memory, in bytes."""

    def free(size: int) -> None:
        monkeypatch.setattr(worker, "free_memory", lambda config: size)

    return free


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.integers(1, 100), st.integers(0, 1_000_000))
def test_the_largest_requests_fit_the_memory_at_once(needs: list[int], cell_bytes: int, memory: int) -> None:
    needs = sorted(needs, reverse=True)
    slots, cells = room_for(needs, 512, cell_bytes, memory)
    assert 1 <= slots <= len(needs)
    assert cells >= max(512, sum(needs[:slots]) if slots > 1 else 0)
    assert slots == 1 or max(512, sum(needs[:slots])) * cell_bytes <= memory
    assert slots == len(needs) or max(512, sum(needs[: slots + 1])) * cell_bytes > memory


@pytest.mark.parametrize(
    ("body", "default", "cells"),
    [
        ({"max_tokens": 20}, None, 20),
        ({"n_predict": 30}, 5, 30),
        ({"max_completion_tokens": 7, "max_tokens": 20}, None, 7),
        ({}, 5, 5),
        ({}, None, 4096),
        ({"max_tokens": -1}, 5, 4096),
        ({"max_tokens": "wrong"}, 5, 4096),
    ],
)
def test_cells_of_a_request(body: dict[str, Any], default: int | None, cells: int) -> None:
    (job,) = jobs_of(1, **body)
    prompt = round(len(job.body) / 3) + 64
    assert cells_of(job, 5000, default) == min(prompt + cells, 5000)


def test_slots_and_flash_attention_on_a_cpu(memory: Any) -> None:
    memory(1 << 40)
    config = fitted(EngineConfig(model=demo_model(), n_gpu_layers=0), jobs_of(40, max_tokens=10))
    assert (config.slots, config.options.flash_attention) == (MOST_ON_CPU, "on")
    assert config.cells is not None
    assert config.cells % 256 == 0
    off = EngineConfig(model=demo_model(), n_gpu_layers=0, options=ModelOptions(flash_attention="off"))
    assert fitted(off, jobs_of(40)).options.flash_attention == "off"


def test_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, config = tmp_path / "meminfo", EngineConfig(model=demo_model(), n_gpu_layers=0)
    monkeypatch.setattr(opening, "_MEMINFO", meminfo)
    monkeypatch.setattr(opening, "_CGROUP", tmp_path)
    assert opening.free_memory(config) == opening._UNKNOWN
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    assert opening.free_memory(config) == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert opening.free_memory(config) == 3000 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert opening.free_memory(config) == 100_000
