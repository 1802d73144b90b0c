"""A `llama_context` and its memory cells: decode a batch, read logits, remove and copy cells.

Contract: one method for each call of llama.cpp that decoding needs, under the field's names, nothing decided here.
The step loop uses it through the protocol `rest_local.decoding.backend.Backend`, which tests fake.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from rest_local.errors import ModelError, OptionError
from rest_local.llama.batch import MOST_IDS, Batch

if TYPE_CHECKING:
    from rest_local.llama.model import Model

CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # enum ggml_type
MAX_OUTPUTS = 64  # a step's root and draft; bounds the logits buffer at 64 x n_vocab floats


def default_threads() -> int:
    """Physical cores this process may use (two hardware threads share one on most machines)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable if usable <= 4 else usable // 2


@dataclass(frozen=True)
class ContextSettings:
    """How a context computes. `flash_attention` and `cache_type` decide what verification costs and whether it is
    exact.
    """

    n_ctx: int = 4096
    n_batch: int = 512
    n_branches: int = 8
    n_slots: int = 1
    n_rs_seq: int = 0
    flash_attention: bool = False
    cache_type: str = "f16"
    threads: int = 0
    offload_kqv: bool = True

    def __post_init__(self) -> None:
        if self.cache_type not in CACHE_TYPES:
            raise OptionError(f"cache type {self.cache_type}: choose one of {', '.join(CACHE_TYPES)}")
        if self.n_ctx < 8:
            raise OptionError(f"a context of {self.n_ctx} tokens is too small; give at least 8")
        if not 0 < self.n_slots * self.n_branches <= MOST_IDS:
            most = MOST_IDS // self.n_branches
            raise OptionError(f"{self.n_slots} slots: llama.cpp has sequence ids for 1 to {most}")
        if self.threads < 0:
            raise OptionError(f"{self.threads} threads: give a positive number, or 0 for all cores")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Context:
    """Memory cells for `n_ctx` tokens shared by all sequence ids, `n_branches` for each slot. Close it, or use `with`.

    Raises ModelError where llama.cpp refuses the settings (out of memory, a cache type that needs flash attention).
    """

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        self.settings = settings
        params = llama_cpp.llama_context_default_params()
        threads = settings.threads or default_threads()
        params.n_ctx = settings.n_ctx
        params.n_batch = params.n_ubatch = min(settings.n_batch, settings.n_ctx)
        params.n_seq_max = settings.n_slots * settings.n_branches
        params.n_rs_seq = settings.n_rs_seq
        params.n_outputs_max = min(MAX_OUTPUTS, params.n_batch)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(settings.flash_attention)
        params.type_k = params.type_v = CACHE_TYPES[settings.cache_type]
        params.offload_kqv = settings.offload_kqv
        params.kv_unified = True
        params.swa_full = True  # a rejected draft near the edge of a sliding window must be able to roll back
        self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(f"model {model.path}: no context with {settings}; try a smaller --ctx or other settings")
        self._model = model
        self._memory = llama_cpp.llama_get_memory(self._pointer)
        # llama.cpp rounds the cells up; who asked for 64 tokens of context gets 64
        self.n_ctx = min(int(llama_cpp.llama_n_ctx_seq(self._pointer)), settings.n_ctx)
        self.n_batch = int(llama_cpp.llama_n_batch(self._pointer))
        self.n_branches = settings.n_branches
        self.n_slots = settings.n_slots
        self.n_rs_seq = int(llama_cpp.llama_n_rs_seq(self._pointer))
        self.n_vocab = model.n_vocab
        self.threads = threads
        self.max_outputs = int(params.n_outputs_max)
        self.batch = Batch(self.n_batch, settings.n_branches)
        self._logits: NDArray[np.float32] = np.empty((0, model.n_vocab), np.float32)
        self._logits_at = 0

    def decode(self) -> int:
        """Evaluate `self.batch`; the code of `llama_decode` (0 done, 1 no room, 2 aborted, negative refused or
        broken).
        """
        return int(llama_cpp.llama_decode(self._pointer, self.batch.struct))

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        """The rows of the last decode, float32 [n_outputs, n_vocab]: a view that the next decode overwrites.

        Rows follow the batch's order among tokens whose `output` was set. Waits for the backend to finish.
        """
        address = ctypes.addressof(llama_cpp.llama_get_logits(self._pointer).contents)
        if address != self._logits_at:  # the block moves when it has to grow; a new view of it costs 0.05 ms
            block = (ctypes.c_float * (self.max_outputs * self.n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(block).reshape(self.max_outputs, self.n_vocab)
            self._logits_at = address
        return self._logits[:n_outputs]

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove sequence `seq` (-1: every one) from the cells at positions [p0, p1); False where the model cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, p0, p1))

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        """Attach `target` to the cells of `source` at positions [p0, p1). Cost grows with p1 - p0, so copy tails
        only.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, p0, p1)

    def clear(self) -> None:
        """Free every cell."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        if self._pointer:
            llama_cpp.llama_free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
