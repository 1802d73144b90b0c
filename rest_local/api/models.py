"""Descriptions of the server's models in the words of each protocol, and their names as clients write them.

Ollama's clients write a model as NAME:TAG, and add `:latest` to a name without a tag. Other clients write the name as
it is listed. A name is only compared, never used as a path.

A server of one model and a server of several list different rows. The metrics are the engine's totals under
llama-server's names, in Prometheus' text format.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.api.requests import prompt_text, sampling_settings, template_of
from rest_local.chat.tools import format_of
from rest_local.chat.tools.answer import ReasoningTags
from rest_local.chat.tools.text_formats import HARMONY
from rest_local.llama.embedding import pooling

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service
    from rest_local.llama.model import Model


TAG = ":latest"


def find_name(asked: str, names: Collection[str]) -> str | None:
    """Find the name that a client means, with or without `:latest`. Returns None if there is none."""
    return next((name for name in (asked, asked.removesuffix(TAG), f"{asked}{TAG}") if name in names), None)


def tagged(name: str) -> str:
    """Return the name as Ollama lists it, with `:latest` if it has no tag."""
    return name if ":" in name else f"{name}{TAG}"


def named_row(name: str, started: int) -> dict[str, Any]:
    """Describe a model in OpenAI's form and Anthropic's. `started` is the server's start in seconds since 1970."""
    since = datetime.fromtimestamp(started, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    openai = {"id": name, "object": "model", "created": started, "owned_by": "rest-local"}
    return openai | {"type": "model", "display_name": name, "created_at": since}


def list_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the list of models in both forms, all on one page."""
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {}
    return {"object": "list", "data": rows, "has_more": False, **ends}


def meta(engine: Engine) -> dict[str, Any]:
    """Describe a loaded model for lists, with llama-server's fields and those that Ollama's lists need."""
    model = engine.model
    return {
        "vocab_type": model.vocabulary.type,
        "n_vocab": model.n_vocab,
        "n_ctx": engine.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "size_vram": _on_gpu(model),
        "architecture": model.metadata.get("general.architecture", ""),
        "quantization": quantization(model.description),
    }


def _on_gpu(model: Model) -> int:
    """Estimate the bytes of the layers on a GPU, as if all layers had one size."""
    layers = model.n_layer + 1
    share = layers if model.n_gpu_layers < 0 else min(model.n_gpu_layers, layers)
    return model.size_bytes * share // layers


_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}


def quantization(description: str) -> str:
    """Extract a name such as Q4_K_M from llama.cpp's description `qwen2 7B Q4_K - Medium`."""
    found = re.search(r"\b(I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4)(?: - (Small|Medium|Large))?", description)
    return "" if found is None else "_".join(filter(None, (found[1], _SIZES.get(found[2] or ""))))


def properties(engine: Engine, name: str, slots: int) -> dict[str, Any]:
    """Return llama-server's properties of a model called `name`.

    Zed and llama.vscode read the context size, the template and its capabilities from them.
    """
    model, vocabulary, sampling = engine.model, engine.model.vocabulary, engine.sampling()
    return {
        "default_generation_settings": {
            "id": 0,
            "n_ctx": engine.n_ctx,
            "params": {
                **sampling_settings(sampling),
                "n_predict": -1,
                "seed": -1 if sampling.seed is None else sampling.seed,
            },
        },
        "total_slots": slots,
        "model_alias": name,
        "model_path": model.path.name,
        "chat_template": model.chat_template or "",
        "chat_template_caps": template_of(engine).capabilities.to_dict() if model.chat_template else {},
        "modalities": {"vision": engine.projector is not None, "audio": False},
        "bos_token": prompt_text(vocabulary, [] if vocabulary.ids.bos is None else [vocabulary.ids.bos]),
        "eos_token": prompt_text(vocabulary, [] if vocabulary.ids.eos is None else [vocabulary.ids.eos]),
        "build_info": f"rest-local {__version__}",
    }


_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens evaluated."),
    "prompt_tokens_cached": ("cached_tokens", "Prompt tokens that were in memory."),
    "prompt_seconds": (
        "prompt_seconds",
        "Time to evaluate prompts; a pass shared by several requests is divided by tokens.",
    ),
    "tokens_predicted": ("predicted_tokens", "Tokens generated."),
    "tokens_predicted_seconds": ("predicted_seconds", "Time to generate tokens, divided likewise."),
    "n_decode": ("passes", "Calls of llama_decode that generated tokens."),
    "spec_decode_num_drafts": ("drafts", "Drafts submitted."),
    "spec_decode_num_draft_tokens": ("drafted", "Drafted tokens submitted."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafted tokens that the model accepted."),
    "spec_decode_num_lookups": ("lookups", "Steps with a lookup of draft tokens."),
    "spec_decode_num_lookups_skipped": ("lookups_skipped", "Steps in which the policy skipped the lookup."),
}
_GAUGES = {
    "requests_processing": ("running", "Requests that are running."),
    "requests_deferred": ("waiting", "Requests that wait for a slot."),
    "kv_cache_tokens": ("cells_used", "KV cache cells in use."),
}
_RATIOS = {
    "prompt_tokens_seconds": ("prompt_tokens", "prompt_seconds", "Prompt tokens per second so far."),
    "predicted_tokens_seconds": ("predicted_tokens", "predicted_seconds", "Generated tokens per second so far."),
    "n_busy_slots_per_decode": ("steps", "passes", "Requests in a call of llama_decode, on average."),
}
# The other metrics describe steps, or tell how much of the prompts was in memory.
_OPEN = (
    *("tokens_predicted", "tokens_predicted_seconds", "predicted_tokens_seconds"),
    *("requests_processing", "requests_deferred"),
)


def exposition(service: Service, shows_steps: bool) -> str:
    """Format the metrics for Prometheus: all of them if `shows_steps`."""
    found = service.statistics() | {"cells_used": sum(slot["n_past"] for slot in service.slots())}
    rows = [(name, "_total", "counter", found[key], text) for name, (key, text) in _COUNTERS.items()]
    rows += [(name, "", "gauge", found[key], text) for name, (key, text) in _GAUGES.items()]
    # llama-server declares this maximum as a counter, too.
    rows.append(("n_tokens_max", "", "counter", found["longest"], "Tokens of the longest prompt with its answer."))
    for name, (count, by, text) in _RATIOS.items():
        rows.append((name, "", "gauge", found[count] / found[by] if found[by] else 0.0, text))
    lines = []
    for name, ending, kind, value, text in rows:
        if shows_steps or name in _OPEN:
            full = f"llamacpp:{name}{ending}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {float(value)}"]
    return "\n".join(lines) + "\n"


def written(seconds: float) -> str:
    """Format a time as RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


# Clients compare Ollama's version before they send tools, `think` or a schema.
VERSION = "0.12.6"
NEVER = "2318-01-01T00:00:00.000000Z"
_UNITS = ((1e12, "T", 1), (1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0))
MAX_TEXT = 4096  # characters of a value in `model_info`


@dataclass(frozen=True)
class Row:
    """A model in a list."""

    name: str  # the name that clients write; lists add `:latest` if it has no tag
    path: Path  # the first file
    meta: Mapping[str, Any]  # the result of `meta`, or empty if the model was never loaded
    is_loaded: bool
    expires: float | None = None  # seconds since 1970 when it is unloaded if unused; None: never

    def to_dict(self) -> dict[str, Any]:
        """Return the row of GET /api/tags. The digest has 64 hexadecimal digits that change with the file."""
        try:
            status = self.path.stat()
            size, modified = status.st_size, status.st_mtime
        except OSError:  # the file was moved while it is mapped
            size, modified = 0, 0.0
        known = f"{self.path.absolute()}\0{size}\0{modified}"
        name, family = tagged(self.name), self.meta.get("architecture", "")
        return {
            "name": name,
            "model": name,
            "modified_at": written(modified),
            "size": self.meta.get("size") or size,
            "digest": hashlib.sha256(known.encode("utf-8", "replace")).hexdigest(),
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": family,
                "families": [family] if family else [],
                "parameter_size": counted(self.meta.get("n_params", 0)),
                "quantization_level": self.meta.get("quantization", ""),
            },
        }


def tags(rows: Iterable[Row]) -> dict[str, Any]:
    """Return all models for GET /api/tags."""
    return {"models": [row.to_dict() for row in rows]}


def running(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the models in memory for GET /api/ps."""
    found = []
    for row in rows:
        if row.is_loaded:
            fields = row.to_dict()
            del fields["modified_at"]
            expires = NEVER if row.expires is None else written(row.expires)
            more = {"size_vram": row.meta.get("size_vram", 0), "context_length": row.meta.get("n_ctx", 0)}
            found.append(fields | {"expires_at": expires} | more)
    return {"models": found}


def version() -> dict[str, Any]:
    return {"version": VERSION, "rest_local": __version__}


def counted(parameters: int) -> str:
    """Format a number of parameters as Ollama writes it: 7.6B, 494.03M."""
    unit = next((unit for unit in _UNITS if parameters >= unit[0]), None)
    return f"{parameters / unit[0]:.{unit[2]}f}{unit[1]}" if unit else str(parameters)


def shown(engine: Engine, name: str) -> dict[str, Any]:
    """Answer POST /api/show for a model, with `name` as the client wrote it.

    - `template` is the model's own, in Jinja. If the model fills gaps, a comment in it names `.Suffix`, which Ollama's
      clients look for.
    - `parameters` has the context size, which clients adopt.
    """
    model = engine.model
    row = Row(name, model.path, meta(engine), is_loaded=True).to_dict()
    template = model.chat_template or ""
    if _fills_gaps(engine):
        template += "{#- .Suffix: this model fills gaps -#}"
    parameters = f"num_ctx {engine.n_ctx}"
    return {
        "modelfile": f"# served by rest-local\nFROM {row['name']}\nPARAMETER {parameters}\n",
        "parameters": parameters,
        "template": template,
        "details": row["details"],
        "model_info": model_info(model),
        "capabilities": capabilities(engine),
        "modified_at": row["modified_at"],
        "license": model.metadata.get("general.license", ""),
    }


def model_info(model: Model) -> dict[str, Any]:
    """Return the keys of the model's file with typed values. Lists, and texts beyond MAX_TEXT, are null."""
    found: dict[str, Any] = {"general.parameter_count": model.n_params}
    for key, text in model.metadata.items():
        found[key] = _typed(text) if len(text) <= MAX_TEXT else None
    return found


def _typed(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("["):  # llama.cpp shortens lists
        return None
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?\d{1,40}\.\d{1,20}(?:e[-+]\d{1,3})?", text):
        return float(text)
    return text


def capabilities(engine: Engine) -> list[str]:
    """Return the model's capabilities in Ollama's words."""
    model = engine.model
    found = ["completion"] if engine.decoder.generates else []
    if pooling(model) is not None:
        return [*found, "embedding"]
    if _fills_gaps(engine):
        found.append("insert")
    if engine.projector is not None:
        found.append("vision")
    if model.chat_template:
        template = template_of(engine)
        if template.capabilities.tools:
            found.append("tools")
        if format_of(template.source) is HARMONY or ReasoningTags.of(template.source, "").usual:
            found.append("thinking")
    return found


def _fills_gaps(engine: Engine) -> bool:
    vocabulary = engine.model.vocabulary
    return None not in (vocabulary.ids.fim_prefix, vocabulary.ids.fim_suffix, vocabulary.ids.fim_middle)
