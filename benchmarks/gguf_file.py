"""GGUF files for fixtures, synthetic models and models with other layers.

- `byte_vocabulary` is a small vocabulary; `rest_local.bench.player` writes the files.
- `thinned` removes layers, which gives a faster model that often agrees: a draft model, where no weights are available.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from rest_local.bench.player import Array as Array
from rest_local.bench.player import Tensor as Tensor
from rest_local.bench.player import Vocabulary as Vocabulary
from rest_local.bench.player import copied_vocabulary as copied_vocabulary
from rest_local.bench.player import write_gguf

write = write_gguf

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
_WORDS = """Ġself Ġdef Ġreturn Ġimport Ġfor Ġin Ġif Ġnot Ġthe Ġto Ġof Ġand Ġa Ġis ĠNone ĠTrue ĠĠĠĠ ĊĠĠĠ
def self import class return print name value"""


def byte_vocabulary(size: int = 384) -> Vocabulary:
    """A byte-level BPE vocabulary (gpt2): the 256 bytes, a few merges for Python, control tokens, padding to `size`."""
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
    """GPT-2's spelling of the 256 bytes: printable Latin-1 unchanged, the others from U+0100 on."""
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
    """A tensor of the original under another name."""
    return Tensor(name, tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type, lambda: tensor.data)
