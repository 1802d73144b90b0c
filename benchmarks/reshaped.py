"""The demo model at another price: with layers that change nothing, and with layers taken out.

Contract: a llama-shaped GGUF goes in, another one comes out. `deepened` says word for word what the original says, in
the time that a larger model takes: behind its own layers stand copies of them whose results are multiplied by zero.
`thinned` is what is left without some layers: a quicker model that often says the same. Together they are a large model
and its draft model, real end to end, where no large weights can be had. Needs the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from benchmarks.gguf_file import Array, Tensor, Vocabulary, write

_ADDED = ("attn_output.weight", "ffn_down.weight")  # what a layer adds to the stream goes through these two
_SKIPPED = ("GGUF.", "general.architecture", "split.", "llama.block_count")


def deepened(source: Path, path: Path, n_layers: int, quant: str | None = None) -> Path:
    """Write `source` with `n_layers` layers in all, the added ones quantized as `quant` (None: as the others). Seconds;
    the file grows with them. Raises ValueError for fewer than it has.
    """
    reader = gguf.GGUFReader(source)
    own = _layers(reader)
    if n_layers < own:
        raise ValueError(f"{source} has {own} layers already")
    return _rebuilt(reader, path, [*range(own), *(i % own for i in range(own, n_layers))], own, quant)


def thinned(source: Path, path: Path, layers: Sequence[int]) -> Path:
    """Write `source` with these of its layers only."""
    return _rebuilt(gguf.GGUFReader(source), path, layers, len(layers))


def _layers(reader: gguf.GGUFReader) -> int:
    return int(reader.fields["llama.block_count"].contents())


def _rebuilt(reader: gguf.GGUFReader, path: Path, layers: Sequence[int], n_real: int, quant: str | None = None) -> Path:
    """Layer k is `layers[k]` of the original; from `n_real` on they add nothing."""
    keys: dict[str, Any] = {"block_count": len(layers)}
    vocabulary = Vocabulary(0)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            vocabulary.keys[name] = field.contents()
        elif not name.startswith(_SKIPPED):
            keys[name.removeprefix("llama.")] = field.contents()
    tensors = [_tensor(tensor, tensor.name) for tensor in reader.tensors if not tensor.name.startswith("blk.")]
    for place, layer in enumerate(layers):
        prefix = f"blk.{layer}."
        for tensor in reader.tensors:
            if tensor.name.startswith(prefix):
                part = tensor.name.removeprefix(prefix)
                name = f"blk.{place}.{part}"
                tensors.append(_idle(tensor, name, part, quant) if place >= n_real else _tensor(tensor, name))
    return write(path, "llama", keys, vocabulary, tensors)


def _tensor(tensor: Any, name: str) -> Tensor:
    """A tensor of the original under another name."""
    return Tensor(name, tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type, lambda: tensor.data)


def _idle(tensor: Any, name: str, part: str, quant: str | None) -> Tensor:
    """One of a layer that adds nothing, matrices as `quant`."""
    same = _tensor(tensor, name)
    values: Array = dequantize(tensor.data, tensor.tensor_type)
    kind = gguf.GGMLQuantizationType[quant] if quant and len(same.shape) > 1 else tensor.tensor_type
    data: Array = quantize(np.zeros_like(values) if part in _ADDED else values, kind)
    return Tensor(name, same.shape, kind, lambda: data)
