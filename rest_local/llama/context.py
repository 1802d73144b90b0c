"""A `llama_context` and its KV cache: decode a batch, read logits, remove and copy cells.

Contract: one method for each llama.cpp call that decoding needs, without decisions of its own. The step loop uses it
through the protocol `rest_local.kv_cache.backend.Backend`, which tests fake.

`Breaker` aborts a running `llama_decode` from another thread. llama.cpp calls its abort callback between the operations
of a graph, a thousand times a step, and a Python callback would have to wait for the GIL each time. So the callback is
the C library's `strlen` on two bytes of memory that belong to the `Breaker`: an empty string has length 0, which is
false (continue); one character has length 1, which is true (abort). It needs no lock and takes nanoseconds. Only the
CPU backend calls it.

`Batch` is a `llama_batch` over numpy arrays whose addresses do not change. The arrays are filled by slicing, without a
Python loop over tokens. More tokens than the capacity are refused here, because llama.cpp would abort the process.
Every token has a contiguous range of sequence ids: a tree in depth first order numbers its leaves in order, so the
leaves below a node are a range.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rest_local import stop
from rest_local.errors import ModelError, OptionError
from rest_local.llama import library, row_wise
from rest_local.llama.cores import default_threads
from rest_local.llama.loaded import bindings, llama_cpp, set_fields
from rest_local.llama.memory import Memory
from rest_local.llama.options import CACHE_TYPES, LEAST_DEFAULT, ROPE_SCALINGS, Rope
from rest_local.stop import Closing

Int32 = NDArray[np.int32]

MOST_IDS = 256  # llama_max_parallel_sequences()
ANY = 1 << 30  # `rollback` of attention, whose cells can be taken back one by one
MAX_OUTPUTS = 64  # the root and the draft of a step; bounds the logits buffer at 64 x n_vocab floats
NO_ROOM, ABORTED = 1, 2  # codes of `llama_decode`: no room in the cells, and after `Breaker.abort`
MAX_CELLS = 1 << 26
"""llama.cpp allocates a record for each cell before it checks the memory for their contents: 10^8 cells took gigabytes,
and 2^29 all memory of the machine. The longest context of a known model is 10 million tokens."""


class Batch:
    """Up to `capacity` tokens with up to `max_ids` sequence ids each. 8 * capacity * (max_ids / 2 + 4) bytes.

    Attributes: `token`, `pos`, `n_ids` int32 [capacity]; `ids` int32 [capacity, max_ids]; `output` int8 [capacity];
    `n_tokens`: the number of tokens that the next decode submits.
    """

    def __init__(self, capacity: int, max_ids: int, n_features: int = 0) -> None:
        """Allocate the arrays. `n_features`: width of `features`, float32 [capacity, n_features], which go with the
        tokens; 0: none.
        """
        self.capacity = capacity
        self.max_ids = max_ids
        self.features = np.zeros((capacity, n_features), np.float32)
        self.n_tokens = 0
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.n_ids = np.zeros(capacity, np.int32)
        self.ids = np.zeros((capacity, max_ids), np.int32)
        self.output = np.zeros(capacity, np.int8)
        # Views of the same memory take Python's own arrays.
        self._token, self._pos, self._n_ids = self.token.data, self.pos.data, self.n_ids.data
        self._ids, self._output = self.ids.reshape(-1).data.cast("B"), self.output.data
        self._id_rows = [np.arange(first, first + max_ids, dtype=np.int32).tobytes() for first in range(MOST_IDS)]
        self._row_bytes = self.ids.strides[0]
        self._rows = self.ids.ctypes.data + self._row_bytes * np.arange(capacity, dtype=np.uint64)
        self.struct = llama_cpp.llama_batch(
            0,
            self.token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            self.features.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if n_features else None,
            self.pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            self.n_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.cast(self._rows.ctypes.data, ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, tokens: ArrayLike, pos: ArrayLike, first_id: ArrayLike, n_ids: ArrayLike, output: ArrayLike) -> None:
        """Replace the content. `tokens`: int [n]; the others: [n], or one value for all tokens.

        Token i belongs to the sequences `first_id[i] .. first_id[i] + n_ids[i] - 1`; it attends to the first of them.
        Raises ValueError if n exceeds the capacity, or a number of ids `max_ids`.
        """
        n = len(np.asarray(tokens))
        columns = (np.broadcast_to(np.asarray(each, np.int32), n).tolist() for each in (pos, first_id, n_ids, output))
        self.load(np.asarray(tokens, np.int32).tolist(), *columns)

    def replace(self, token: int, pos: int) -> None:
        """Replace the one token of a batch by the next one of the same sequences. 1 us."""
        self._token[0], self._pos[0] = token, pos

    def load(self, tokens: list[int], pos: list[int], first_id: list[int], n_ids: list[int], output: list[int]) -> None:
        """Do the same as `fill`, from lists of one length. 20 us for 16 tokens after a forward pass, with cold caches;
        numpy took 66 us.
        """
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise ValueError(f"{n} tokens do not fit a batch of {self.capacity}")
        if min(n_ids) < 1 or max(n_ids) > self.max_ids:
            raise ValueError(f"a token has 1 to {self.max_ids} sequence ids")
        if n == 1:  # A plain step takes a third of the time this way.
            self._token[0], self._pos[0], self._n_ids[0], self._output[0] = tokens[0], pos[0], n_ids[0], output[0]
            self._ids[: self._row_bytes] = self._id_rows[first_id[0]]
            self.n_tokens = self.struct.n_tokens = 1
            return
        self._token[:n] = array("i", tokens)
        self._pos[:n] = array("i", pos)
        self._n_ids[:n] = array("i", n_ids)
        rows = self._id_rows
        self._ids[: n * self._row_bytes] = b"".join([rows[first] for first in first_id])
        self._output[:n] = array("b", output)
        self.n_tokens = self.struct.n_tokens = n


if TYPE_CHECKING:
    from rest_local.llama.model import Model


_is_set = ctypes.cast(library.c_library.strlen, bindings.ggml_abort_callback)

_open: weakref.WeakSet[Breaker] = weakref.WeakSet()
_open_lock = threading.Lock()


def abort_all() -> bool:
    """Abort every running decode of this process. Return False if there was none."""
    with _open_lock:
        breakers = list(_open)
    aborted = [breaker.abort() for breaker in breakers]  # a list, so that `any` does not end at the first one
    return any(aborted)


class Breaker:
    """The abort flag of one context. A `with` block is one decode. The decoding thread sets `number` before a decode to
    identify its purpose, so that a late abort does not hit another decode; 0 means no number.

    Entering the block raises ServiceClosed in a thread that was stopped (`rest_local.stop`).
    """

    def __init__(self, context: int) -> None:
        self.number = 0
        self._aborted_number = 0
        self._flag = (ctypes.c_char * 2)()
        self._lock = threading.Lock()
        self._running = False
        llama_cpp.llama_set_abort_callback(context, _is_set, ctypes.addressof(self._flag))
        with _open_lock:
            _open.add(self)

    def abort(self, number: int | None = None) -> bool:
        """Abort the running decode, from any thread, and return whether one was running. `llama_decode` then returns 2
        within a few milliseconds. With `number`, abort only decodes of that number, the running one and future ones.

        A GPU finishes its batch. Afterwards the evaluated part of the batch has to be removed, or the whole sequence if
        the model cannot remove a part.
        """
        with self._lock:
            if number is not None:
                self._aborted_number = number
            matches = self._running and number in (None, self.number)
            if matches:
                self._set_flag()
            return matches

    def close(self) -> None:
        """Leave `abort_all`, before the context is freed."""
        with _open_lock:
            _open.discard(self)

    def __enter__(self) -> None:
        stop.enter(self.abort)
        with self._lock:
            self._clear_flag()
            self._running = True
            if self.number and self.number == self._aborted_number:
                self._set_flag()

    def __exit__(self, *_: object) -> None:
        self._running = False  # An interrupt while it waits for the lock would leave this True.
        self._clear_flag()

    def _set_flag(self) -> None:
        library.mute()
        self._flag[0] = b"\1"

    def _clear_flag(self) -> None:
        if self._flag[0] != b"\0":
            library.unmute()
            self._flag[0] = b"\0"


@dataclass(frozen=True)
class ContextSettings:
    """The settings of a context. `flash_attention` and the cache types decide the cost of verification and whether it
    is exact. Raises OptionError for invalid values.

    There are `n_slots` slots with `n_branches` sequence ids each. A slot holds up to `n_ctx` tokens, and all share
    `n_cells` cells, 0 = `n_ctx`. `n_ubatch` tokens are computed at once, 0 = `n_batch`. `threads`: 0 =
    `default_threads`; `threads_batch` is for more than one token, 0 = `threads`.
    """

    n_ctx: int = LEAST_DEFAULT
    n_batch: int = 512
    n_ubatch: int = 0
    n_branches: int = 8
    n_slots: int = 1
    n_cells: int = 0
    n_rs_seq: int = 0
    flash_attention: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    threads: int = 0
    threads_batch: int = 0
    offload_kqv: bool = True
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        for cache_type in (self.cache_type_k, self.cache_type_v):
            if cache_type not in CACHE_TYPES:
                raise OptionError(f"cache type {cache_type}: choose one of {', '.join(CACHE_TYPES)}")
        if self.n_ctx < 8:
            raise OptionError(f"a context of {self.n_ctx} tokens is too small; give at least 8")
        if (cells := max(self.n_ctx, self.n_cells)) > MAX_CELLS:
            raise OptionError(
                f"{cells} tokens of context in all slots: at most {MAX_CELLS} are possible; give a smaller `n_ctx`"
            )
        if not 0 < self.n_slots * self.n_branches <= MOST_IDS or self.n_slots < 1:
            most = MOST_IDS // max(self.n_branches, 1)
            raise OptionError(f"{self.n_slots} slots: llama.cpp has sequence ids for 1 to {most}; give fewer `slots`")
        if 0 < self.n_cells < self.n_ctx:
            raise OptionError(f"{self.n_cells} cells hold no context of {self.n_ctx} tokens; change `cells` or `n_ctx`")
        if min(self.threads, self.threads_batch) < 0:
            fewest = min(self.threads, self.threads_batch)
            raise OptionError(f"{fewest} threads: give a positive number, or 0 for the default")
        if self.n_batch < 1 or self.n_ubatch < 0:
            raise OptionError(f"batches of {self.n_batch} and {self.n_ubatch} tokens: give positive numbers")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ContextSettings:
        """Invert `to_dict`. Raises TypeError or KeyError for other data."""
        return cls(**{**data, "rope": Rope(**data["rope"])})


class Context(Memory, Closing):
    """A context whose cells all sequence ids share, `n_branches` ids for each slot. Use `with` or `close`.

    Applies the model's LoRA adapters. All methods belong to one thread, except `breaker.abort`. Raises ModelError if
    llama.cpp refuses the settings (out of memory, a cache type that needs flash attention).
    """

    def __init__(
        self,
        model: Model,
        settings: ContextSettings,
        *,
        mtp: bool = False,
        other: Context | None = None,
        n_features: int = 0,
    ) -> None:
        """Create the context.

        mtp: of the model's MTP layer instead of the model
        other: the target of an EAGLE-3 head that uses its embeddings; it must outlive this one
        n_features: as for `Batch`
        """
        self.settings = settings
        params = _parameters(settings)
        if mtp:
            set_fields(params, ctx_type=llama_cpp.LLAMA_CONTEXT_TYPE_MTP)
        if other is not None:
            set_fields(params, ctx_other=other.pointer)
        collected: AbstractContextManager[list[int]] = (
            row_wise.collected_backends() if _has_two_ways(model, settings) else nullcontext([])
        )
        with library.log_lines.collected_errors() as errors, collected as backends:
            pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not pointer:
            cause = f" ({errors[0][:200]})" if errors else ""
            raise ModelError(
                f"model {model.path}: no context of {params.n_ctx} tokens{cause}, with flash attention "
                f"{'on' if settings.flash_attention else 'off'} and a cache of {settings.cache_type_k} and "
                f"{settings.cache_type_v}; if memory is short, give a smaller `n_ctx`"
            )
        try:
            model.adapters.apply(pointer)
        except BaseException:
            llama_cpp.llama_free(pointer)
            raise
        super().__init__(pointer)
        self.shortcuts = row_wise.Shortcuts(backends)
        self._model = model  # The model lives as long as its context.
        # llama.cpp rounds the number of cells up, but the context keeps the requested size.
        self.n_ctx = min(int(llama_cpp.llama_n_ctx_seq(self._pointer)), settings.n_ctx)
        self.n_cells = settings.n_cells or settings.n_ctx
        self.n_batch = int(llama_cpp.llama_n_batch(self._pointer))
        self.n_ubatch = int(llama_cpp.llama_n_ubatch(self._pointer))
        self.n_branches = settings.n_branches
        self.n_slots = settings.n_slots
        self.rollback = int(llama_cpp.llama_n_rs_seq(pointer)) if model.is_recurrent or model.is_hybrid else ANY
        self.n_vocab = model.n_vocab
        self.n_swa = int(llama_cpp.llama_model_n_swa(model.pointer))
        self.threads, self.threads_batch = int(params.n_threads), int(params.n_threads_batch)
        self.max_outputs = min(MAX_OUTPUTS, self.n_batch)
        self.batch = Batch(self.n_batch, settings.n_branches, n_features)
        self._logits = (0, np.empty((0, model.n_vocab), np.float32))  # an address, and a view of what is there
        self.breaker = Breaker(pointer)

    def decode(self) -> int:
        """Evaluate `self.batch`. Return the code of `llama_decode`: 0 done, 1 no room, 2 aborted, negative: failed."""
        batch, n = self.batch, self.batch.n_tokens
        no_output = n >= row_wise.TILE and not batch.output[:n].any()
        self.shortcuts.use(no_output and self.shortcuts.tiles(n, int(batch.pos[:n].max()) + 1))
        with self.breaker:
            return int(llama_cpp.llama_decode(self._pointer, batch.struct))

    def decode_rows(
        self, rows: NDArray[np.float32], pos: NDArray[np.int32], first_id: ArrayLike, n_ids: int, *, causal: bool = True
    ) -> int:
        """Evaluate rows of embeddings in the place of tokens, without outputs. Return the code of `llama_decode`.

        `rows`: float32 [n, width of the model's input]. `pos`: int32 [n], or [4, n] for a model with M-RoPE. A row
        belongs to the sequences `first_id .. first_id + n_ids - 1`, with one `first_id` for all or int [n]. Without
        `causal` each row attends to all of them; `n` is then at most `n_ubatch`, because llama.cpp aborts beyond.
        Raises ValueError for more rows than fit.
        """
        n, most = len(rows), self.n_batch if causal else self.n_ubatch
        if not 0 < n <= most:
            raise ValueError(f"{n} rows do not fit a batch of {most}")
        rows, pos = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(pos, np.int32)
        ids = np.broadcast_to(np.asarray(first_id, np.int32), n)[:, None] + np.arange(n_ids, dtype=np.int32)
        counts, output = np.full(n, n_ids, np.int32), np.zeros(n, np.int8)
        places = ids.ctypes.data + ids.strides[0] * np.arange(n, dtype=np.uint64)
        self.shortcuts.use(self.shortcuts.tiles(n, int(pos.max()) + 1))
        batch = llama_cpp.llama_batch(
            n,
            None,
            rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.cast(places.ctypes.data, ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        with self.breaker:
            if not causal:
                llama_cpp.llama_set_causal_attn(self._pointer, False)
            try:
                return int(llama_cpp.llama_decode(self._pointer, batch))
            finally:
                if not causal:
                    llama_cpp.llama_set_causal_attn(self._pointer, True)

    def synchronize(self) -> None:
        """Wait for the end of the computation: a GPU still computes when `decode` has returned."""
        llama_cpp.llama_synchronize(self._pointer)

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        """Return the logits of the last decode, float32 [n_outputs, n_vocab]: a view that the next decode overwrites.

        There is a row for each token whose `output` was set, in the order of the batch. Waits for the backend.
        """
        address = _logits_at(self._pointer)
        if not address:
            raise ValueError("no logits: no token was evaluated with an output")
        if address != self._logits[0]:  # the buffer moves when it grows; a new view of it costs 0.05 ms
            block = (ctypes.c_float * (self.max_outputs * self.n_vocab)).from_address(address)
            self._logits = address, np.ctypeslib.as_array(block).reshape(self.max_outputs, self.n_vocab)
        return self._logits[1][:n_outputs]

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        if self._pointer:
            self.breaker.close()
            llama_cpp.llama_free(self._pointer)
            self._pointer = None


def use_threads(context: Context, n: int) -> None:
    """Decode with `n` threads from now on, at most those of the settings. The bits of logits can change."""
    most, most_batch = context.threads, context.threads_batch
    llama_cpp.llama_set_n_threads(context.pointer, min(n, most), min(n, most_batch))


def _has_two_ways(model: Model, settings: ContextSettings) -> bool:
    """Return True if attention can be computed row by row and in tiles, as the pass needs it."""
    on_cpu = not (library.supports_gpu() and model.n_gpu_layers)
    one_type = settings.cache_type_k == settings.cache_type_v and settings.cache_type_k in row_wise.TYPES
    return on_cpu and settings.flash_attention and one_type and row_wise.available()


# This returns a plain address. The objects of ctypes for the pointer and its content cost 6 us after a forward pass.
_logits_at = ctypes.cast(llama_cpp.llama_get_logits, ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p))


def _parameters(settings: ContextSettings) -> Any:
    """Return llama_context_params."""
    params = llama_cpp.llama_context_default_params()
    n_batch = min(settings.n_batch, settings.n_ctx)
    n_sequences = settings.n_slots * settings.n_branches
    threads = settings.threads or default_threads()
    rope = settings.rope
    set_fields(
        params,
        n_ctx=settings.n_cells or settings.n_ctx,
        n_batch=n_batch,
        n_ubatch=min(settings.n_ubatch or n_batch, n_batch),
        n_seq_max=n_sequences,
        n_rs_seq=settings.n_rs_seq,
        n_outputs_max=max(min(MAX_OUTPUTS, n_batch), n_sequences),  # With fewer outputs than sequences it aborts.
        n_threads=threads,
        n_threads_batch=settings.threads_batch or threads,
        flash_attn_type=int(settings.flash_attention),
        type_k=CACHE_TYPES[settings.cache_type_k],
        type_v=CACHE_TYPES[settings.cache_type_v],
        offload_kqv=settings.offload_kqv,
        kv_unified=True,
        swa_full=True,  # A rejected draft near the edge of a sliding window can then be rolled back.
        rope_freq_base=rope.freq_base,
        rope_freq_scale=rope.freq_scale,
        yarn_orig_ctx=rope.yarn_orig_ctx,
        yarn_ext_factor=rope.yarn_ext_factor,
        yarn_attn_factor=rope.yarn_attn_factor,
        yarn_beta_slow=rope.yarn_beta_slow,
        yarn_beta_fast=rope.yarn_beta_fast,
    )
    if rope.scaling is not None:
        set_fields(params, rope_scaling_type=ROPE_SCALINGS.index(rope.scaling))
    return params
