"""Switch the shortcuts of flash attention on a CPU on and off.

llama.cpp's CPU code walks through the cells of a row one by one, and skips those that are masked. If K and V have
one float type it takes two shortcuts: a single row is split over the threads from 512 cells on, and 64 rows or more are
computed in tiles. A row gets other bits in each of them, so a draft could change a token at a near-tie. But tiles are
what makes long prompts fast: 1.4 times at 1 000 tokens and 1.8 times at 3 500 (SmolLM2-135M on 2 cores of a Zen 4).

ggml can leave the shortcuts out, and can change that between two passes: `ggml_backend_cpu_set_use_ref`. It wants the
backend that a context computes with, which llama.cpp keeps to itself. So the function of the CPU device that makes
backends is replaced while a context is created. Its place in `ggml_backend_device` is not part of a public header;
`available` makes a backend to see whether that function is really there, and writes only where the system says that it
may; that is known on Linux alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rest_local.llama.library import CPU_DEVICE, ggml

# Where steps are computed row by row, parts of prompts are computed in tiles, which have TILE rows, from UNTILED tokens
# of text on. Tiles give other bits if a text lies in other cells, so short texts, whose time nobody sees, go without.
# Without tiles, 64 tokens take 1.3 times as long at 512 tokens of context, and 1.9 times at 2 048 and 4 096.
TILE, UNTILED = 64, 256
TYPES = ("f16", "f32")  # the cache types that have the shortcuts
_INIT_BACKEND = 5  # the number of functions before `init_backend` in `ggml_backend_device_i` (ggml-backend-impl.h)
_Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_SetReference = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)
_lock = threading.Lock()


@functools.cache
def available() -> bool:
    """Return True if this build of llama.cpp can leave the shortcuts out. Takes 1 ms, once."""
    if _set_reference() is None or not is_writable(_device()):
        return False
    with collected_backends() as collected:
        backend = ggml("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(_device(), None)
    ggml("ggml_backend_free", None, ctypes.c_void_p)(backend)
    return collected == [backend]


@contextmanager
def collected_backends() -> Iterator[list[int]]:
    """Collect the CPU backends that are made in the block, by any thread."""
    place = ctypes.c_void_p.from_address(_device() + _INIT_BACKEND * ctypes.sizeof(ctypes.c_void_p))
    collected: list[int] = []
    with _lock:
        original = place.value
        make = _Init(original or 0)

        def make_and_collect(device: int, parameters: int) -> int:
            backend = int(make(device, parameters))
            collected.append(backend)
            return backend

        replacement = _Init(make_and_collect)  # This name keeps it alive during the block.
        place.value = ctypes.cast(replacement, ctypes.c_void_p).value
        try:
            yield collected
        finally:
            place.value = original


class Shortcuts:
    """The shortcuts of the CPU backends that one context computes with. They are left out until `use`."""

    def __init__(self, backends: Sequence[int]) -> None:
        self.backends, self._on = backends, True
        self.use(False)

    def tiles(self, n: int, end: int) -> bool:
        """Return True if a part of `n` tokens without outputs, up to position `end`, is computed in tiles. If the
        settings decide, return False.
        """
        return n >= TILE and end > UNTILED and bool(self.backends)

    def use(self, on: bool) -> None:
        """Take the shortcuts from the next pass on, or leave them out. A change takes 1 us."""
        if on != self._on:
            self._on = on
            for backend in self.backends:
                set_reference = _set_reference()
                assert set_reference is not None, "nothing was collected without it"
                set_reference(backend, not on)


@functools.cache
def _set_reference() -> Callable[[int, bool], None] | None:
    registry = ggml("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(_device())
    find = ggml("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    address = find(registry, b"ggml_backend_cpu_set_use_ref")
    return _SetReference(address) if address else None


def is_writable(address: int) -> bool:
    """Return True if memory may be written, as far as `/proc` tells."""
    try:
        ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return False
    for place, rights, *_ in ranges:
        begin, end = (int(number, 16) for number in place.split("-"))
        if begin <= address < end:
            return rights.startswith("rw")
    return False


def _device() -> int:
    return int(ggml("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(CPU_DEVICE))
