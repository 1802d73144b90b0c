"""llama.cpp itself: initialised once per process, its log handed to `logging`, and what it was built with.

Everything it says goes to the logger "rest_local.llama", line by line; nothing is printed. The log callback is
process-wide in llama.cpp, so this module takes it for good the moment it is imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import llama_cpp
from llama_cpp import llama_cpp as bindings

from rest_local.errors import OptionError

logger = logging.getLogger("rest_local.llama")
logger.addHandler(logging.NullHandler())  # else logging prints warnings of an unconfigured program to stderr

_CONTINUE = 5  # GGML_LOG_LEVEL_CONT: more of the previous message
# ggml.h's own order; the table in llama-cpp-python's _logger.py is that of an older ggml (it takes errors for debug).
_LEVELS = {0: logging.DEBUG, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class LogLines:
    """Puts llama.cpp's messages together to lines: a message may hold several, or continue the one before it.

    Fed from any thread of llama.cpp. Errors are also kept for whoever collects them (`collected_errors`).
    """

    def __init__(self, target: logging.Logger) -> None:
        self._target = target
        self._lock = threading.RLock()  # a logging handler may itself call into llama.cpp
        self._level = logging.INFO
        self._pending = ""
        self.collectors: list[list[str]] = []

    def feed(self, level: int, text: bytes) -> None:
        """One callback of llama.cpp: ggml log level and UTF-8 text."""
        with self._lock:
            if level != _CONTINUE:
                self._flush()
                self._level = _LEVELS.get(level, logging.INFO)
            self._pending += text.decode("utf-8", "replace")
            *lines, self._pending = self._pending.split("\n")
            for line in lines:
                self._emit(line)

    def _flush(self) -> None:
        line, self._pending = self._pending, ""
        self._emit(line)

    def _emit(self, line: str) -> None:
        if not line.strip():
            return
        if self._level >= logging.ERROR:
            for collector in self.collectors:
                collector.append(line.strip())
        if self._target.isEnabledFor(self._level):
            self._target.log(self._level, "%s", line.rstrip())

    @contextmanager
    def collected_errors(self) -> Iterator[list[str]]:
        """The error lines that llama.cpp logs while the block runs (of all threads)."""
        errors: list[str] = []
        with self._lock:
            self.collectors.append(errors)
        try:
            yield errors
        finally:
            with self._lock:  # by identity: two empty lists are equal
                self.collectors = [other for other in self.collectors if other is not errors]


log_lines = LogLines(logger)


@bindings.llama_log_callback  # type: ignore[untyped-decorator]
def _log_callback(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Module level on purpose: llama.cpp keeps the address for the life of the process."""
    log_lines.feed(level, text or b"")


llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))  # before init, which already logs
llama_cpp.llama_backend_init()

c_library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
_silence = ctypes.cast(c_library.abs, bindings.llama_log_callback)


def mute() -> None:
    """llama.cpp's log goes nowhere until `unmute`: for the moment in which a decode is broken off.

    It says so in its log, and a Ctrl-C that waits for its turn would be raised in the Python callback, where ctypes can
    only drop it. `abs` of the level does nothing and needs no Python."""
    llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))


def unmute() -> None:
    """Undo `mute`; without one it does nothing."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))


@dataclass(frozen=True, slots=True)
class Device:
    """A device ggml can compute on. `memory_bytes` and what is free of it are 0 where the backend does not say."""

    name: str
    description: str
    memory_bytes: int
    free_bytes: int = 0


def versions() -> dict[str, str]:
    """`llama-cpp-python`, `llama.cpp` and `ggml`, with the commit of ggml."""
    return {
        "llama-cpp-python": str(llama_cpp.__version__),
        "llama.cpp": bindings.llama_version().decode(),
        "ggml": f"{_text('ggml_version')} ({_text('ggml_commit')})",
    }


def fingerprint() -> str:
    """One string that changes when llama.cpp or what it was built with changes: a key for cached measurements."""
    return " ".join((*versions().values(), system_info()))


def system_info() -> str:
    """llama.cpp's own line on the instruction sets and backends it was built with."""
    return str(bindings.llama_print_system_info().decode("utf-8", "replace")).strip()


def supports_gpu() -> bool:
    """Whether layers can be put on a GPU: built with such a backend, and a device is there."""
    return bool(bindings.llama_supports_gpu_offload())


def backends() -> list[str]:
    """Names of the registered ggml backends, such as CPU, CUDA, Metal, Vulkan."""
    count = _ggml("ggml_backend_reg_count", ctypes.c_size_t)()
    get = _ggml("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _ggml("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    return [name(get(i)).decode("utf-8", "replace") for i in range(count)]


def devices() -> list[Device]:
    """The devices of all backends, the CPU included."""
    count = _ggml("ggml_backend_dev_count", ctypes.c_size_t)()
    get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    description = _ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    size_p = ctypes.POINTER(ctypes.c_size_t)
    memory = _ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)
    found = []
    for i in range(count):
        device, free, total = get(i), ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        texts = (name(device).decode("utf-8", "replace"), description(device).decode("utf-8", "replace"))
        found.append(Device(*texts, total.value, free.value))
    return found


def gpus() -> dict[str, int]:
    """What layers can be put on: the name of each device but the CPU's own, and its address."""
    count = _ggml("ggml_backend_dev_count", ctypes.c_size_t)()
    get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    kind = _ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    found = [get(i) for i in range(count)]
    return {name(device).decode("utf-8", "replace"): device for device in found if kind(device) != _CPU_DEVICE}


def buffer_types() -> dict[str, int]:
    """Where tensors can be placed: the name of each device's buffer type (such as CPU, CUDA0) and its address."""
    count = _ggml("ggml_backend_dev_count", ctypes.c_size_t)()
    get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    type_of = _ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    name = _ggml("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    addresses = [type_of(get(i)) for i in range(count)]
    return {name(address).decode("utf-8", "replace"): address for address in addresses if address}


def use_numa(strategy: str) -> None:
    """Spread memory and threads over the nodes of the machine: `distribute`, `isolate` or `numactl`.

    Once per process, before the first model; the same again does nothing. Raises OptionError for another strategy."""
    global _numa
    if _numa is None:
        llama_cpp.llama_numa_init(_NUMA[strategy])
        _numa = strategy
    elif _numa != strategy:
        raise OptionError(f"numa {strategy}: this process already runs with {_numa}; start another one")


_CPU_DEVICE = 0  # enum ggml_backend_dev_type
_NUMA = {
    "distribute": bindings.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": bindings.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": bindings.GGML_NUMA_STRATEGY_NUMACTL,
}
_numa: str | None = None


def _text(function: str) -> str:
    return str(_ggml(function, ctypes.c_char_p)().decode("utf-8", "replace"))


def _ggml(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    """A function of ggml that the bindings do not declare; it resolves through libllama's own dependencies."""
    function: ctypes._NamedFuncPointer = getattr(bindings._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
