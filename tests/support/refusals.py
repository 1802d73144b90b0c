"""Files that are damaged in one way, and what an engine says of what it cannot draft with."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest

from rest_local import Engine


def renamed(path: Path) -> Path:
    """The same file with another token in its vocabulary."""
    path.write_bytes(path.read_bytes().replace(b"return", b"retorn"))
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-4096])
    return path


def with_nan(path: Path, name: str = "norm") -> Path:
    """The same file, in which all tensors with such a name are not numbers."""
    found = [tensor for tensor in gguf.GGUFReader(path).tensors if name in tensor.name]
    assert found
    data = bytearray(path.read_bytes())
    for tensor in found:
        values = np.full(tensor.n_elements, np.nan, np.float32).tobytes()
        data[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = values
    path.write_bytes(data)
    return path


def refusal(engine: Engine, path: Path, caplog: pytest.LogCaptureFixture, warned: Sequence[str] = ()) -> str:
    """The one line of an engine about the file at `path`; it drafts without. `warned`: what it says in any case."""
    (line,) = [told for told in engine.warnings if told not in warned]
    assert line.startswith("going on without ")
    assert "\n" not in line
    assert line.count(str(path)) == 1
    assert engine.context.drafter is None
    assert engine.settings["draft_model"] is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # or the command line would show two lines
    assert not [record for record in warnings if not record.name.startswith("rest_local.llama")]
    return line


@contextmanager
def opened(target: Path, drafter: Path | None, caplog: pytest.LogCaptureFixture, n_ctx: int = 256) -> Iterator[Engine]:
    """An engine that drafts with a file, or with what is in the target's own; warnings are noted."""
    given = {} if drafter is None else {"draft_model": drafter}
    with (
        caplog.at_level(logging.WARNING, "rest_local"),
        Engine.load(target, n_ctx=n_ctx, threads=1, **given) as engine,  # type: ignore[arg-type]
    ):
        yield engine


@contextmanager
def little_memory(n_bytes: int) -> Iterator[None]:
    """This process gets at most `n_bytes` more of address space."""
    import resource

    status = Path("/proc/self/status").read_text()
    used = 1024 * int(re.search(r"VmSize:\s+(\d+)", status)[1])  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
