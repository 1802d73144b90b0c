"""Load a model file: convert the options for llama.cpp, and try it in a child process first.

- `LoadParameters` are `ModelOptions` as `llama_model_params`, with the arrays that those point to. They make no
  decisions, and must be kept until the load has returned.
- `Adapters` are the LoRA adapters of an open model. All of them are loaded with it and freed before it. A context
  applies all of them, each with its scale.
- `ensure_loadable` loads a model in a child process first, because a hostile or broken GGUF file can abort or crash
  llama.cpp. The child reads no weights (mapped, CPU only, not repacked) and makes a small context, which builds the
  compute graph. It takes about half a second for each new (path, size, mtime, options, llama.cpp); success is
  remembered in the cache directory. Each LoRA adapter has a child of its own, which also evaluates a token, so that
  errors name the right file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rest_local import paths, sandbox
from rest_local.errors import AdapterInvalid, ModelInvalid, ModelNotFound, OptionError
from rest_local.llama import library
from rest_local.llama.gguf import Files, check_header, identity_of
from rest_local.llama.loaded import bindings, llama_cpp, set_fields
from rest_local.llama.options import SPLIT_MODES, Adapter, ModelOptions, Override

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # expert tensors, as in llama.cpp's --cpu-moe
CPU = "CPU"
TIMEOUT_SECONDS = 60.0  # a small file takes longer only if it makes llama.cpp loop
SECONDS_PER_BYTE = 2.4e-9  # added for large files: 300 s in all for 100 GB, which even a slow disk maps faster
_SAMPLE = 1 << 20  # an adapter's digest covers so many bytes at each end


class _Placed(ctypes.Structure):
    """A struct llama_model_tensor_buft_override, which the bindings leave opaque."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@dataclass
class LoadParameters:
    """The `struct` for llama_model_load_from_file, and the arrays it points to."""

    struct: Any
    _alive: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, options: ModelOptions, n_gpu_layers: int, *, vocab_only: bool, on_cpu: bool = False) -> LoadParameters:
        """Convert the options. A trial load is `on_cpu`: mapped, not repacked, every tensor in main memory."""
        struct = llama_cpp.llama_model_default_params()
        set_fields(
            struct,
            vocab_only=vocab_only,
            n_gpu_layers=0 if on_cpu else n_gpu_layers,
            load_mode=_load_mode(on_cpu or options.mmap, options.mlock and not on_cpu),
            use_extra_bufts=options.repack and not on_cpu,  # repacking reads all weights
            check_tensors=options.check_tensors and not on_cpu,
        )
        made = cls(struct)
        if options.override_kv:
            set_fields(struct, kv_overrides=made._keep(_overrides(options.override_kv)))
        placed = _placements(options)
        if placed:
            set_fields(struct, tensor_buft_overrides=ctypes.addressof(made._keep(_placed(placed, on_cpu))))
        if not on_cpu:
            set_fields(struct, split_mode=SPLIT_MODES.index(options.split_mode), main_gpu=options.main_gpu)
            if options.devices:
                set_fields(struct, devices=ctypes.addressof(made._keep(_devices(options.devices))))
            if options.tensor_split:
                set_fields(struct, tensor_split=made._keep(_shares(options.tensor_split)))
        return made

    def _keep(self, array: Any) -> Any:
        self._alive.append(array)
        return array


def _load_mode(use_mmap: bool, use_mlock: bool) -> int:
    modes = {
        (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
        (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
        (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
        (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }
    return int(modes[use_mmap, use_mlock])


def _overrides(overrides: tuple[Override, ...]) -> Any:
    """Make an array of llama_model_kv_override, which ends with an empty key."""
    array = (bindings.llama_model_kv_override * (len(overrides) + 1))()
    for entry, override in zip(array, overrides, strict=False):
        entry.key = override.key.encode()
        tag, member = {
            "int": (bindings.LLAMA_KV_OVERRIDE_TYPE_INT, "val_i64"),
            "float": (bindings.LLAMA_KV_OVERRIDE_TYPE_FLOAT, "val_f64"),
            "bool": (bindings.LLAMA_KV_OVERRIDE_TYPE_BOOL, "val_bool"),
            "str": (bindings.LLAMA_KV_OVERRIDE_TYPE_STR, "val_str"),
        }[override.kind]
        entry.tag = tag
        value = override.value
        setattr(entry.value, member, value.encode() if isinstance(value, str) else value)
    return array


def _placements(options: ModelOptions) -> list[tuple[str, str]]:
    """Return patterns with buffer names. llama.cpp takes the first match, so explicit placements come first."""
    placed = [(placement.pattern, placement.buffer) for placement in options.override_tensor]
    if options.cpu_moe:
        return [*placed, (EXPERTS, CPU)]
    return [*placed, *((rf"blk\.{layer}{EXPERTS}", CPU) for layer in range(options.n_cpu_moe))]


def _placed(placements: list[tuple[str, str]], on_cpu: bool) -> Any:
    """Make an array of `_Placed` with an empty entry at its end. Raises OptionError for a missing buffer."""
    most = int(bindings.llama_max_tensor_buft_overrides()) - 1
    if len(placements) > most:
        raise OptionError(f"{len(placements)} tensor overrides: llama.cpp takes at most {most}")
    types = library.buffer_types()
    array = (_Placed * (len(placements) + 1))()
    for entry, (pattern, buffer) in zip(array, placements, strict=False):
        if buffer not in types:
            raise OptionError(f"tensor override {pattern}={buffer}: this llama.cpp has {', '.join(types)}")
        entry.pattern, entry.buffer_type = pattern.encode(), types[CPU if on_cpu else buffer]
    return array


def _devices(names: tuple[str, ...]) -> Any:
    """Make an array of devices with a null at its end. Raises OptionError for a device that llama.cpp lacks."""
    known = library.gpus()
    wanted = () if names == ("none",) else names
    for name in wanted:
        if name not in known:
            raise OptionError(f"device {name}: this llama.cpp has {', '.join(known) or 'no GPU'}; `none` uses the CPU")
    return (ctypes.c_void_p * (len(wanted) + 1))(*(known[name] for name in wanted), None)


def _shares(shares: tuple[float, ...]) -> Any:
    most = int(bindings.llama_max_devices())
    if len(shares) > most:
        raise OptionError(f"tensor split over {len(shares)} GPUs: llama.cpp takes at most {most}")
    return (ctypes.c_float * most)(*shares)


class Adapters:
    """The loaded adapters of one model. `identity` has digest and scale of each, JSON-ready."""

    def __init__(self, model: int, wanted: Sequence[Adapter]) -> None:
        """Load the adapters. Raises AdapterInvalid with the file and the cause."""
        self._pointers: list[Any] = []
        self.wanted = tuple(wanted)
        try:
            for adapter in self.wanted:
                self._pointers.append(_load_adapter(model, adapter.path))
            self.identity = [(_digest(adapter.path), adapter.scale) for adapter in self.wanted]
        except BaseException:
            self.close()
            raise

    def apply(self, context: int) -> None:
        """Let a context compute with the adapters. Raises AdapterInvalid if llama.cpp refuses."""
        if not self._pointers:
            return
        count = len(self._pointers)
        pointers = (bindings.llama_adapter_lora_p_ctypes * count)(*self._pointers)
        scales = (ctypes.c_float * count)(*(adapter.scale for adapter in self.wanted))
        if bindings.llama_set_adapters_lora(context, pointers, count, scales):
            raise AdapterInvalid(self.wanted[0].path, "llama.cpp cannot apply it to this model")

    def close(self) -> None:
        """Free the adapters. A second call does nothing. Contexts that use them must be closed before."""
        while self._pointers:
            bindings.llama_adapter_lora_free(self._pointers.pop())


def _load_adapter(model: int, path: Path) -> Any:
    """Load a llama_adapter_lora_p. Raises AdapterInvalid. May abort on a hostile file: `ensure_loadable`."""
    with library.log_lines.collected_errors() as errors:
        pointer = bindings.llama_adapter_lora_init(model, os.fsencode(path))
    if not pointer:
        raise AdapterInvalid(path, one_line(errors, last=True))
    if bindings.llama_adapter_get_alora_n_invocation_tokens(pointer):
        bindings.llama_adapter_lora_free(pointer)
        raise AdapterInvalid(path, "is an activated LoRA (aLoRA), which only applies after its own start sequence")
    return pointer


def _digest(path: Path) -> str:
    """Digest the size, the beginning and the end. That suffices, because training changes every weight."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        return hashlib.sha256(b"%d" % size + begin + file.read(_SAMPLE)).hexdigest()[:32]


def ensure_loadable(files: Files, vocab_only: bool, options: ModelOptions) -> None:
    """Check that a child process can load the model and each of its adapters, now or in an earlier run. `files` are all
    files of the model, in order. Raises ModelInvalid or AdapterInvalid with the cause.
    """
    path = files[0][0]
    names = ("override_kv", "override_tensor", "cpu_moe", "n_cpu_moe")  # these could crash a process
    loaded = ModelOptions(**{name: getattr(options, name) for name in names})
    task = {"path": os.path.abspath(path), "vocab_only": vocab_only, "options": asdict(loaded)}
    if cause := cause_of(__name__, files, task):
        raise ModelInvalid(path, cause, "leave out the overrides, or check them" if loaded != ModelOptions() else "")
    for adapter in () if vocab_only else options.lora:
        try:
            status = check_header(adapter.path)
        except ModelNotFound:
            raise AdapterInvalid(adapter.path, "no such file") from None
        except ModelInvalid as error:
            raise AdapterInvalid(adapter.path, error.cause) from None
        absolute = Adapter(Path(os.path.abspath(adapter.path)), adapter.scale)
        task["options"] = asdict(replace(loaded, lora=(absolute,)))
        if cause := cause_of(__name__, [*files, (adapter.path, status)], task):
            raise AdapterInvalid(adapter.path, cause)


def cause_of(module: str, files: Files, task: Mapping[str, Any], timeout: float | None = None) -> str | None:
    """Return why a child process cannot load the files, or None if it can, now or in an earlier run.

    The `main` of `module` executes `task`, and reports `error`, before that perhaps stages as `at`. `timeout` is in
    seconds; None is for a child that reads no weights.
    """
    text = json.dumps(task, default=str)
    record = json.dumps([identity_of(files), module, text, library.fingerprint()]).encode("utf-8", "surrogateescape")
    name = f"probe-{hashlib.sha256(record).hexdigest()[:32]}.json"
    try:
        if (paths.cache_dir() / name).read_bytes() == record:
            return None
    except OSError:
        pass  # not tried before
    if timeout is None:
        timeout = TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)
    try:
        ended = sandbox.run(module, text, timeout)
    except OSError as error:
        library.logger.warning("model %s: not tried in a child process: %s", files[-1][0], error)
        return None
    if "error" not in ended.seen:
        return f"llama.cpp {ended.end} while {ended.seen.get('at', 'loading it')}"
    if cause := ended.seen["error"]:
        return str(cause)
    try:
        paths.write_atomically(paths.cache_dir() / name, record)
    except OSError as error:
        library.logger.warning("model %s: its trial cannot be remembered: %s", files[-1][0], error)
    return None


def load_error(path: str, vocab_only: bool, options: ModelOptions | None = None) -> str | None:
    """Load the model in this process. Return llama.cpp's error, or None. May abort; see `ensure_loadable`."""
    options = options or ModelOptions()
    parameters = LoadParameters.of(options, 0, vocab_only=vocab_only, on_cpu=True)
    with library.log_lines.collected_errors() as errors:
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters.struct)
        if not model:
            return one_line(errors)
        if vocab_only:
            return None
        context_parameters = llama_cpp.llama_context_default_params()
        set_fields(context_parameters, n_ctx=64, n_batch=64, n_ubatch=64)
        context = llama_cpp.llama_init_from_model(model, context_parameters)
        if not context:
            return one_line(errors)
    return _adapter_error(model, context, options) if options.lora else None


def _adapter_error(model: int, context: int, options: ModelOptions) -> str | None:
    """Apply the adapters and evaluate a token, because some wrong shapes only fail, or abort, then."""
    try:
        Adapters(model, options.lora).apply(context)
    except AdapterInvalid as error:
        return error.cause
    if not llama_cpp.llama_model_has_decoder(model):
        return None
    code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(0), 1))
    return f"llama.cpp cannot compute with it (llama_decode returned {code})" if code else None


def one_line(errors: Sequence[str], last: bool = False) -> str:
    """Return llama.cpp's errors as one cause. For a model the first line names it, and later ones ("failed to load
    model") repeat it; for an adapter the last one does, after those of the file reader.
    """
    lines = [line for line in errors if line]
    line = lines[-1 if last else 0] if lines else ""
    cause = line.split("error loading model: ")[-1].split("failed to apply lora adapter: ")[-1].strip().rstrip(".: ")
    return f"llama.cpp cannot load it: {cause[:300]}" if cause else "llama.cpp cannot load it"


def main(text: str) -> None:
    """Run the child process. `text` is the task of `ensure_loadable`."""
    task = json.loads(text)
    options = ModelOptions.from_dict(task["options"])
    sandbox.report(error=load_error(task["path"], task["vocab_only"], options))
    os._exit(0)  # Freeing a damaged model may crash.


if __name__ == "__main__":
    main(sys.argv[1])
