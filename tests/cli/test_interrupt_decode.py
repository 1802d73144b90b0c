"""Ctrl-C while llama.cpp evaluates a large batch: the batch is broken off, not waited for, and no handler swallows
the interrupt.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.synthetic import Shape, synthetic

SLOW = Shape(layers=8, width=512, heads=8, kv_heads=8, feed=2048, vocab=512, tied=True)

# A thread interrupts as soon as a decode runs. Of a batch that was waited for, all cells would be there.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
from rest_local.cli import interrupt
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

interrupt.watch()
N = 2048
with Model.open(sys.argv[1]) as model:
    with Context(model, ContextSettings(n_ctx=2 * N, n_batch=N, n_branches=1, threads=1)) as context:
        def press():
            while not context._breaker._running:
                pass
            os.kill(os.getpid(), signal.SIGINT)
        context.batch.fill(np.arange(N) % 200 + 40, np.arange(N), 0, 1, 0)
        threading.Thread(target=press).start()
        try:
            context.decode()
            print("nobody raised")
        except KeyboardInterrupt:
            print("raised with", context.end(0), "cells")
        interrupt.reset()
        context.batch.fill([50, 51], [0, 1], 0, 1, 0)
        print("then", context.decode(), context.end(0))
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(SLOW, "Q8_0", tmp_path_factory.mktemp("slow") / "slow.gguf")


def test_interrupt_breaks_off_the_batch_that_is_evaluated(slow: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(slow)], capture_output=True, text=True, timeout=300, env=os.environ.copy()
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["raised with 0 cells", "then 0 2"]
