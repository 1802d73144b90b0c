"""Change the memory of a `llama_context`: KV cells and recurrent state, by sequence."""

from __future__ import annotations

import ctypes

import numpy as np

from rest_local.llama.loaded import llama_cpp


class Memory:
    """A context's memory: one method for each call of llama.cpp, without decisions."""

    def __init__(self, context: int) -> None:
        self._pointer: int | None = context
        self._memory = llama_cpp.llama_get_memory(context)

    @property
    def pointer(self) -> int:
        """Return the llama_context_p. Raises ValueError after `close`."""
        if not self._pointer:
            raise ValueError("the context is closed")
        return int(self._pointer)

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove sequence `seq` (-1: all) from the cells at positions [p0, p1). Return False if the model cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, p0, p1))

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        """Add `target` to the cells of `source` at positions [p0, p1). Cost grows with p1 - p0, so copy only tails."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, p0, p1)

    def end(self, seq: int) -> int:
        """Return the position after the last cell of `seq`; 0 without cells."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def begin(self, seq: int) -> int:
        """Return the first position of `seq` (in a sliding window) from which all have cells, or -1 without any."""
        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, seq))

    def state_size(self, seq: int) -> int:
        """Return the bytes of `save(seq)`."""
        return int(llama_cpp.llama_state_seq_get_size_ext(self._pointer, seq, 0))

    def save(self, seq: int, *, partial: bool = False, on_device: bool = False) -> bytes:
        """Return the state of a sequence for `restore`, or nothing if that fails. It is about as large as the cells.

        With `partial` it is only the state that cannot be rolled back, which is the recurrent state and the cells of a
        sliding window: kilobytes for a hybrid model whose attention takes megabytes. For a model with full attention it
        is the whole state. With `on_device` the content stays in the memory of the device, if this llama.cpp can do
        that; there is one such state of each sequence, the newest.
        """
        flags = _flags(partial, on_device)
        size = int(llama_cpp.llama_state_seq_get_size_ext(self._pointer, seq, flags))
        buffer = (ctypes.c_uint8 * size)()
        written = int(llama_cpp.llama_state_seq_get_data_ext(self._pointer, buffer, size, seq, flags))
        return bytes(memoryview(buffer)[:written])

    def restore(self, seq: int, state: bytes | memoryview, *, partial: bool = False, on_device: bool = False) -> bool:
        """Restore a state of `save`, with the same `partial` and `on_device`. If it does not fit, clear `seq` and
        return False.

        A partial state needs the cells of all positions before it, unchanged since `save`. Then call
        `remove(seq, position)`, which succeeds. This is not checked: otherwise logits are wrong without an error.
        """
        flags = _flags(partial, on_device)
        content = np.frombuffer(state, np.uint8)  # A copy would cost megabytes.
        buffer = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = int(llama_cpp.llama_state_seq_set_data_ext(self._pointer, buffer, len(state), seq, flags))
        if read and read == len(state):  # 0 means an error
            return True
        self.remove(seq, 0)
        return False

    def clear(self) -> None:
        """Free all cells."""
        llama_cpp.llama_memory_clear(self._memory, False)


def _flags(partial: bool, on_device: bool) -> int:
    """Return llama_state_seq_flags."""
    stays = getattr(llama_cpp, "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE", 0) if on_device else 0
    return int(partial) * int(llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) | int(stays)
