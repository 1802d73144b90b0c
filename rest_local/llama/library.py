"""Initialise llama.cpp once per process, forward its log to `logging`, and describe its build.

All log lines go to the logger "rest_local.llama"; nothing is printed. The log callback is global in llama.cpp, so this
module installs it once, when it is imported.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rest_local.errors import OptionError
from rest_local.llama.loaded import bindings, llama_cpp

logger = logging.getLogger("rest_local.llama")
logger.addHandler(logging.NullHandler())  # or `logging` prints warnings to stderr in unconfigured programs

_CONTINUE = 5  # GGML_LOG_LEVEL_CONT: continues the previous message
# The order of ggml.h. The table in llama-cpp-python's _logger.py is that of an older ggml: there errors become debug.
_LEVELS = {0: logging.DEBUG, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class LogLines:
    """A joiner of llama.cpp's messages to lines: a message may hold several lines, or continue the one before it. Any
    thread of llama.cpp may call `feed`. `collected_errors` gives the error lines to its caller as well.
    """

    def __init__(self, target: logging.Logger) -> None:
        self._target = target
        self._lock = threading.RLock()  # a logging handler may itself call into llama.cpp
        self._level = logging.INFO
        self._pending = ""
        self.collectors: list[list[str]] = []

    def feed(self, level: int, text: bytes) -> None:
        """Add one message of the log callback: a ggml log level and UTF-8 text."""
        with self._lock:
            if level != _CONTINUE:
                line, self._pending = self._pending, ""
                self._emit(line)
                self._level = _LEVELS.get(level, logging.INFO)
            self._pending += text.decode("utf-8", "replace")
            *lines, self._pending = self._pending.split("\n")
            for line in lines:
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
        """Collect the error lines that llama.cpp logs while the block runs, in any thread."""
        errors: list[str] = []
        with self._lock:
            self.collectors.append(errors)
        try:
            yield errors
        finally:
            with self._lock:  # Compare by identity, because two empty lists are equal.
                self.collectors = [other for other in self.collectors if other is not errors]


log_lines = LogLines(logger)


@bindings.llama_log_callback  # type: ignore[untyped-decorator]
def _log_callback(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    # It stands at module level, because llama.cpp keeps the address for the life of the process.
    log_lines.feed(level, text or b"")


llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))  # the next call logs already
llama_cpp.llama_backend_init()

c_library = ctypes.CDLL(None)
_silence = ctypes.cast(c_library.abs, bindings.llama_log_callback)


def mute() -> None:
    """Discard llama.cpp's log until `unmute`, for the moment in which a decode is aborted. llama.cpp logs the abort,
    and a pending Ctrl-C would be raised in the Python callback, where ctypes can only drop it. So the callback becomes
    `abs`, which does nothing with the level and needs no Python.
    """
    llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))


def unmute() -> None:
    """Undo `mute`. Without an earlier `mute` it does nothing."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ggml. `memory_bytes` and `free_bytes` are 0 if the backend does not know them."""

    name: str
    description: str
    memory_bytes: int
    free_bytes: int = 0


def versions() -> dict[str, str]:
    """Return the versions of `llama-cpp-python`, `llama.cpp` and `ggml`, with the commit of ggml."""
    return {
        "llama-cpp-python": str(llama_cpp.__version__),
        "llama.cpp": bindings.llama_version().decode(),
        "ggml": f"{_text('ggml_version')} ({_text('ggml_commit')})",
    }


def fingerprint() -> str:
    """Return a key for cached measurements, which changes with llama.cpp and its build options."""
    return " ".join((*versions().values(), system_info()))


def system_info() -> str:
    """Return llama.cpp's line about the instruction sets and backends of its build."""
    return str(bindings.llama_print_system_info().decode("utf-8", "replace")).strip()


def supports_gpu() -> bool:
    """Return True if layers can be put on a GPU: the build has such a backend, and there is a device."""
    return bool(bindings.llama_supports_gpu_offload())


def backends() -> list[str]:
    """Return the names of the registered ggml backends, such as CPU, CUDA, Metal, Vulkan."""
    count = ggml("ggml_backend_reg_count", ctypes.c_size_t)()
    get = ggml("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = ggml("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    return [name(get(i)).decode("utf-8", "replace") for i in range(count)]


def devices() -> list[Device]:
    """Return the devices of all backends, the CPU included."""
    description = ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    size_p = ctypes.POINTER(ctypes.c_size_t)
    memory = ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)
    found = []
    for name, device in _devices():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(Device(name, description(device).decode("utf-8", "replace"), total.value, free.value))
    return found


def gpus() -> dict[str, int]:
    """Return name and address of each device except the CPU."""
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    return {name: device for name, device in _devices() if kind(device) != CPU_DEVICE}


def buffer_types() -> dict[str, int]:
    """Return name and address of each device's buffer type for tensors, such as CPU, CUDA0."""
    type_of = ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    name = ggml("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    addresses = [type_of(device) for _, device in _devices()]
    return {name(address).decode("utf-8", "replace"): address for address in addresses if address}


def use_numa(strategy: str) -> None:
    """Set how memory and threads use the NUMA nodes of the machine: `distribute`, `isolate` or `numactl`. It applies to
    the process, and must be called before the first model is loaded. A second call with the same strategy does nothing;
    with another it raises OptionError.
    """
    global _numa
    if _numa is None:
        llama_cpp.llama_numa_init(_NUMA[strategy])
        _numa = strategy
    elif _numa != strategy:
        raise OptionError(f"numa {strategy}: this process already runs with {_numa}; start another process")


CPU_DEVICE = 0  # enum ggml_backend_dev_type
_NUMA = {
    "distribute": bindings.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": bindings.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": bindings.GGML_NUMA_STRATEGY_NUMACTL,
}
_numa: str | None = None


def _devices() -> list[tuple[str, int]]:
    count = ggml("ggml_backend_dev_count", ctypes.c_size_t)()
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name = ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    return [(name(device).decode("utf-8", "replace"), device) for device in map(get, range(count))]


def _text(function: str) -> str:
    return str(ggml(function, ctypes.c_char_p)().decode("utf-8", "replace"))


def ggml(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    """Return a function of ggml that the bindings do not declare, found through the dependencies of libllama."""
    function: ctypes._NamedFuncPointer = getattr(bindings._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
