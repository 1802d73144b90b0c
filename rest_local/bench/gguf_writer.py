"""Writes GGUF files tensor by tensor, with a vocabulary that is made or copied. One tensor at a time is in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Tensor:
    """A tensor to write. `make` returns its data when it is written (raw bytes, uint8, for quantized types)."""

    name: str
    shape: tuple[int, ...]  # numpy order: (out, in)
    kind: Any  # gguf.GGMLQuantizationType
    make: Callable[[], Array]


@dataclass
class Vocabulary:
    """The tokenizer of a GGUF: its keys and values, and the number of tokens."""

    size: int
    keys: dict[str, Any] = field(default_factory=dict)
    never: tuple[int, ...] = ()  # ids that a fixture should not generate: control tokens and padding


def write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    vocabulary: Vocabulary | None,
    tensors: list[Tensor],
    tensors_per_file: int = 0,
) -> Path:
    """Write or replace the file, and return its path. `keys`: without "<architecture>.", or with "general." or
    "adapter."; the type of a value sets its GGUF type (bool, int as uint32, float as float32, str, list).

    `tensors_per_file`: write several files, NAME-00001-of-00003.gguf, and return the first.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    for key, value in keys.items():
        _add(writer, key if key.startswith(_WHOLE) else f"{architecture}.{key}", value)
    for key, value in vocabulary.keys.items() if vocabulary else ():
        _add(writer, key, value)
    for tensor in tensors:
        byte_shape = (
            tensor.shape if tensor.kind in _PLAIN else gguf.quants.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        )
        element: np.dtype[Any] = _PLAIN.get(tensor.kind, np.dtype(np.uint8))
        n_bytes = int(np.prod(byte_shape)) * element.itemsize
        writer.add_tensor_info(tensor.name, byte_shape, element, n_bytes, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(np.ascontiguousarray(tensor.make()))
    writer.close()
    count = -(-len(tensors) // tensors_per_file) if tensors_per_file else 1
    return path.with_name(f"{path.stem}-00001-of-{count:05d}.gguf") if count > 1 else path


_WHOLE = ("general.", "adapter.")  # prefixes of keys that do not belong to the architecture
_PLAIN: dict[Any, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def copied_vocabulary(source: Path, size: int | None = None) -> Vocabulary:
    """The vocabulary of another GGUF, possibly a vocabulary-only file, padded with unused tokens to `size`, if given.
    Raises ValueError if it is larger.
    """
    fields = gguf.GGUFReader(source).fields
    keys = {key: entry.contents() for key, entry in fields.items() if key.startswith("tokenizer.")}
    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    size = len(tokens) if size is None else size
    padding = [f"[PAD{i}]" for i in range(len(tokens), size)]
    if len(tokens) > size:
        raise ValueError(f"{source} has {len(tokens)} tokens, the model only {size}")
    keys["tokenizer.ggml.tokens"] = tokens + padding
    for key, filler in (("token_type", int(gguf.TokenType.UNUSED)), ("scores", -1e9)):
        if f"tokenizer.ggml.{key}" in keys:
            keys[f"tokenizer.ggml.{key}"] = [*keys[f"tokenizer.ggml.{key}"], *[filler] * len(padding)]
    return Vocabulary(size, keys)
