"""GGUF files for fixtures, synthetic models and models with other layers.

- `write` writes a file, `byte_vocabulary` makes a small vocabulary.
- `thinned` removes layers, which gives a faster model that often agrees: a draft model, where no weights are available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_WHOLE = ("general.", "adapter.")  # Keys with these prefixes do not belong to the architecture.
_PLAIN: dict[Any, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.I64: np.dtype(np.int64),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
_WORDS = """Ġself Ġdef Ġreturn Ġimport Ġfor Ġin Ġif Ġnot Ġthe Ġto Ġof Ġand Ġa Ġis ĠNone ĠTrue ĠĠĠĠ ĊĠĠĠ
def self import class return print name value"""


@dataclass
class Tensor:
    """A tensor to write. `make` returns its data when it is written, as raw bytes (uint8) for quantized types."""

    name: str
    shape: tuple[int, ...]  # In numpy's order: (out, in).
    kind: Any  # A gguf.GGMLQuantizationType.
    make: Callable[[], Array]


@dataclass
class Vocabulary:
    """The tokenizer of a GGUF: its keys and values, and the number of tokens."""

    size: int
    keys: dict[str, Any] = field(default_factory=dict)
    never: tuple[int, ...] = ()  # Control tokens and padding, which a fixture should not generate.


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
    """Copy the vocabulary of a GGUF, padded with unused tokens to `size`. Raises ValueError if it is larger."""
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


def byte_vocabulary(size: int = 384) -> Vocabulary:
    """Make a byte-level BPE vocabulary (gpt2) with a few merges for Python, control tokens, and padding to `size`."""
    tokens = _byte_tokens()
    merges: list[str] = []
    for word in _WORDS.split():
        built = word[0]
        for character in word[1:]:
            merge = f"{built} {character}"
            built += character
            if merge not in merges:
                merges.append(merge)
                tokens += [built] if built not in tokens else []
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    control = [END, CHAT_START, CHAT_END, *FIM]
    never = range(len(tokens), max(size, len(tokens) + len(control)))
    tokens += control
    kinds += [gguf.TokenType.CONTROL] * len(control)
    padding = [f"[PAD{i}]" for i in range(len(tokens), size)]
    tokens += padding
    kinds += [gguf.TokenType.UNUSED] * len(padding)
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(END),
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return Vocabulary(len(tokens), keys, tuple(never))


def _byte_tokens() -> list[str]:
    """Spell the 256 bytes as GPT-2 does: printable Latin-1 unchanged, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (chr(256 + i) for i in range(256 - len(printable)))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


_SKIPPED = ("GGUF.", "general.architecture", "split.", "llama.block_count")


def thinned(source: Path, path: Path, layers: Sequence[int]) -> Path:
    """Write `source` with only these of its layers."""
    reader = gguf.GGUFReader(source)
    keys: dict[str, Any] = {"block_count": len(layers)}
    vocabulary = Vocabulary(0)
    for name, entry in reader.fields.items():
        if name.startswith("tokenizer."):
            vocabulary.keys[name] = entry.contents()
        elif not name.startswith(_SKIPPED):
            keys[name.removeprefix("llama.")] = entry.contents()
    tensors = [_tensor(tensor, tensor.name) for tensor in reader.tensors if not tensor.name.startswith("blk.")]
    for place, layer in enumerate(layers):
        prefix = f"blk.{layer}."
        of_layer = [tensor for tensor in reader.tensors if tensor.name.startswith(prefix)]
        tensors += [_tensor(each, f"blk.{place}.{each.name.removeprefix(prefix)}") for each in of_layer]
    return write(path, "llama", keys, vocabulary, tensors)


def _tensor(tensor: Any, name: str) -> Tensor:
    """Return a tensor of the original under another name."""
    return Tensor(name, tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type, lambda: tensor.data)
