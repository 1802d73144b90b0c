"""Describe the models on the disk without loading them: size, quantization, context, memory, drafting.

The facts come from headers and file names. A header takes 15 to 40 ms, because its vocabulary has to be walked over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rest_local.catalog.quantization import FILE_TYPES, label_of, stem_of
from rest_local.catalog.stores import StoredModel, stored_models
from rest_local.errors import ModelError
from rest_local.llama.gguf import Gguf, read_gguf, shards_of
from rest_local.llama.options import LEAST_DEFAULT, MOST_SNAPSHOTS

_F32 = 4  # bytes of a number of recurrent state
_F16 = 2  # bytes of a cached key or value by default

# Architectures whose recurrent state llama.cpp can roll back, for the estimate of memory before loading. Loading finds
# it out by trying. A test compares them with llama.cpp. Keys tell whether a model has such a state.
ROLLED_BACK = frozenset({
    "bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35",
    "qwen35moe", "qwen4exp",
})  # fmt: skip
_RECURRENT_KEYS = (".ssm.", ".wkv.", ".shortconv.", ".kda.")
INTERVALS = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "qwen4exp": 4}  # every n-th layer attends
BOTH = frozenset({"falcon-h1"})  # layers with attention and recurrent state
_NO_MODEL = ("adapter", "mmproj", "imatrix", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts in the header of one file."""

    kind: str = "model"  # or "adapter", "mmproj", "imatrix", "vocabulary"
    architecture: str = ""
    parameters: str = ""  # the size in the file's words, such as "7B"; may be empty
    quantization: str = ""
    n_ctx_train: int = 0  # context in tokens; 0 if unknown
    chat_template: bool = False
    kv_bytes: int = 0  # KV cache for each token of context
    state_bytes: int = 0  # recurrent state of a text, and of each snapshot; 0 if there is none, or it is unknown
    # "tree" if whole trees of draft tokens can be verified, "chain" if recurrent state can be rolled back only a few
    # tokens, "none" for plain decoding.
    drafting: str = "none"
    vocabulary: str = ""  # the tokenizer's name, as datastores record it; others may have the same name


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model in the list. Name, path and store are those of StoredModel."""

    name: str
    path: str
    store: str
    bytes: int = 0  # size of all its files
    # Estimate: weights, a KV cache for LEAST_DEFAULT tokens or the trained context, a recurrent state and snapshots.
    memory_bytes: int = 0
    header: Header = Header()
    error: str = ""  # why it cannot be used


def list_models(
    stored: Sequence[StoredModel] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[ModelFacts]:
    """List the models on the disk, with a damaged file's error and without adapters, projectors and vocabularies.

    Args:
        stored: models to describe, by default all on the disk
        progress: called with the number of models that were looked at, and of all
    """
    stored = stored_models() if stored is None else stored
    found = []
    for number, model in enumerate(stored, 1):
        facts = _facts(model)
        if facts.header.kind not in _NO_MODEL:
            found.append(facts)
        progress(number, len(stored))
    return found


def _facts(model: StoredModel) -> ModelFacts:
    facts = ModelFacts(name=model.name, path=str(model.path), store=model.store)
    try:
        size = sum(part.stat().st_size for part in shards_of(model.path))
        header = header_of(read_gguf(model.path), model.path)
    except OSError as error:
        return replace(facts, error=f"cannot be read: {error.strerror or error}")
    except ModelError as error:
        return replace(facts, error=getattr(error, "cause", "") or str(error))
    n_ctx = min(LEAST_DEFAULT, header.n_ctx_train or LEAST_DEFAULT)
    memory = size + n_ctx * header.kv_bytes + (1 + snapshots_of(header)) * header.state_bytes
    return replace(facts, bytes=size, memory_bytes=memory, header=header)


def header_of(metadata: Gguf, path: Path) -> Header:
    """Read the keys of a header. The name in `path` may tell the quantization if the keys do not."""
    architecture = metadata.text("general.architecture")
    counted = metadata.counts.get("tokenizer.ggml.tokens", 0)
    tokenizer, pre = metadata.text("tokenizer.ggml.model") or "unknown", metadata.text("tokenizer.ggml.pre")
    kind = "mmproj" if architecture == "clip" else metadata.text("general.type") or "model"
    if kind == "model" and not metadata.n_tensors and "split.count" not in metadata.values:
        kind = "vocabulary"
    label = label_of(path.name)
    named = label if label != stem_of(path.name) else ""
    return Header(
        kind=kind,
        architecture=architecture,
        parameters=metadata.text("general.size_label"),
        quantization=named or FILE_TYPES.get(metadata.number("general.file_type", -1), ""),
        n_ctx_train=metadata.number(f"{architecture}.context_length"),
        chat_template="tokenizer.chat_template" in metadata.values,
        kv_bytes=_kv_bytes(metadata, architecture),
        state_bytes=_state_bytes(metadata, architecture),
        drafting=_drafting(metadata, architecture),
        vocabulary=f"{tokenizer}{f'/{pre}' if pre else ''} of {counted} tokens",
    )


def _drafting(metadata: Gguf, architecture: str) -> str:
    if architecture.startswith("t5") or metadata.values.get(f"{architecture}.attention.causal") is False:
        return "none"
    return "chain" if architecture in ROLLED_BACK or _recurrent_layers(metadata, architecture) else "tree"


def _kv_bytes(metadata: Gguf, architecture: str) -> int:
    """Return the size of keys and values of all layers with attention, as f16. A sliding window takes less."""

    def number(key: str, default: int = 0) -> int:
        return metadata.number(f"{architecture}.{key}", default)

    heads = number("attention.head_count")
    width = number("embedding_length") // heads if heads else 0
    size = number("attention.key_length", width) + number("attention.value_length", width)
    kv_heads = metadata.values.get(f"{architecture}.attention.head_count_kv", heads)
    if isinstance(kv_heads, list):  # one number for each layer
        return sum(int(count) for count in kv_heads) * size * _F16
    attending = number("block_count") - (0 if architecture in BOTH else _recurrent_layers(metadata, architecture))
    return number("attention.head_count_kv", heads) * attending * size * _F16


def snapshots_of(header: Header, wanted: int | None = None) -> int:
    """Return how many snapshots of its recurrent state llama.cpp keeps for each text if `wanted` are asked for."""
    most = MOST_SNAPSHOTS if wanted is None else wanted
    return most if header.state_bytes and header.architecture in ROLLED_BACK else 0


def _recurrent_layers(metadata: Gguf, architecture: str) -> int:
    """Count the layers with recurrent state (`llama_hparams::is_recr`); 0 if no key says that there is any."""
    has_keys = any(key.startswith(f"{architecture}{part}") for key in metadata.values for part in _RECURRENT_KEYS)
    if not has_keys and architecture != "minimax-01":
        return 0
    layers = metadata.number(f"{architecture}.block_count") - metadata.number(f"{architecture}.nextn_predict_layers")
    kv_heads = metadata.values.get(f"{architecture}.attention.head_count_kv")
    if isinstance(kv_heads, list):
        feed = metadata.values.get(f"{architecture}.feed_forward_length")
        plain = feed if isinstance(feed, list) and architecture.startswith("nemotron_h") else [0] * len(kv_heads)
        return sum(not kv and not ff for kv, ff in zip(kv_heads[:layers], plain, strict=False))
    if isinstance(marked := metadata.values.get(f"{architecture}.attention.recurrent_layers"), list):
        return sum(map(bool, marked[:layers]))
    if architecture not in INTERVALS:
        return layers
    interval = metadata.number(f"{architecture}.full_attention_interval", INTERVALS[architecture])
    return layers - layers // interval if interval else layers


def _state_bytes(metadata: Gguf, architecture: str) -> int:
    """Return the bytes of `llama_hparams::n_embd_r` and `n_embd_s` of all recurrent layers."""

    def number(key: str, default: int = 0) -> int:
        return metadata.number(f"{architecture}.{key}", default)

    width, heads, conv = number("embedding_length"), number("attention.head_count"), number("ssm.conv_kernel")
    if size := number("wkv.head_size"):
        each = width * (number("token_shift_count", 2) + size)
    elif kept := number("shortconv.l_cache"):
        each = width * (kept - 1)
    elif size := number("kda.head_dim"):
        each = heads * size * (3 * (conv - 1 if conv else 3) + size)
    elif architecture == "minimax-01":
        each = heads * number("attention.key_length") ** 2
    else:
        inner, state = number("ssm.inner_size"), number("ssm.state_size")
        each = max(conv - 1, 0) * (inner + 2 * number("ssm.group_count") * state) + inner * state
    return _F32 * each * _recurrent_layers(metadata, architecture)
