"""What Ollama's API says about models: lists, the one that is shown, and the version. Knows no HTTP.

`tags` and `running` make their JSON of rows, so that a server of several models can list rows of its own; `rows_of` has
those of a server with one model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.chat.tools import format_of
from rest_local.chat.tools.answer import ReasoningTags
from rest_local.chat.tools.text_formats import HARMONY
from rest_local.llama.embedding import pooling
from rest_local.server.model_info import meta
from rest_local.server.names import tagged
from rest_local.server.ollama.answers import written
from rest_local.server.prompts import template_of
from rest_local.server.state import State

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.llama.model import Model

VERSION = "0.12.6"
"""The version of Ollama whose API this is. Clients compare it before they send tools, `think` or a schema."""

NEVER = "2318-01-01T00:00:00.000000Z"
_UNITS = ((1e12, "T", 1), (1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0))
MAX_TEXT = 4096  # of a value in `model_info`


@dataclass(frozen=True)
class Row:
    """A model in a list. What is not known, because the model is not loaded, is empty or 0.

    name          as clients write it; lists add `:latest` where it has no tag
    modified      when its file was written, in seconds since 1970
    size          of all tensors, in bytes; `on_gpu`: of those on a GPU
    digest        64 hexadecimal digits that change with the file
    family        its architecture
    parameters    how many there are
    quantization  such as Q4_K_M
    context       tokens of one request
    is_loaded     whether it is in memory
    expires       when it is unloaded unless it is used, in seconds since 1970; None: never
    """

    name: str
    modified: float
    size: int = 0
    on_gpu: int = 0
    digest: str = "0" * 64
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    context: int = 0
    is_loaded: bool = False
    expires: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that all lists share."""
        name = tagged(self.name)
        return {"name": name, "model": name, "size": self.size, "digest": self.digest, "details": self.details}

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": counted(self.parameters),
            "quantization_level": self.quantization,
        }


def tags(rows: Iterable[Row]) -> dict[str, Any]:
    """GET /api/tags: all models."""
    return {"models": [row.to_dict() | {"modified_at": written(row.modified)} for row in rows]}


def running(rows: Iterable[Row]) -> dict[str, Any]:
    """GET /api/ps: those in memory."""
    return {
        "models": [
            row.to_dict()
            | {
                "expires_at": NEVER if row.expires is None else written(row.expires),
                "size_vram": row.on_gpu,
                "context_length": row.context,
            }
            for row in rows
            if row.is_loaded
        ]
    }


def version() -> dict[str, Any]:
    """GET /api/version."""
    return {"version": VERSION, "rest_local": __version__}


def counted(parameters: int) -> str:
    """A number of parameters as Ollama writes it: 7.6B, 494.03M."""
    unit = next((unit for unit in _UNITS if parameters >= unit[0]), None)
    return f"{parameters / unit[0]:.{unit[2]}f}{unit[1]}" if unit else str(parameters)


def row_of(name: str, path: Path, meta: Mapping[str, Any], *, is_loaded: bool, expires: float | None = None) -> Row:
    """The row of a model. `path`: its first file; `meta`: what is known of it (`model_info.meta`), may be empty."""
    try:
        status = path.stat()
        size, modified = status.st_size, status.st_mtime
    except OSError:  # the file was moved while it is mapped
        size, modified = 0, 0.0
    known = f"{path.absolute()}\0{size}\0{modified}"
    return Row(
        name=name,
        modified=modified,
        size=meta.get("size") or size,
        on_gpu=meta.get("size_vram", 0) if is_loaded else 0,
        digest=hashlib.sha256(known.encode("utf-8", "replace")).hexdigest(),
        family=meta.get("architecture", ""),
        parameters=meta.get("n_params", 0),
        quantization=meta.get("quantization", ""),
        context=meta.get("n_ctx", 0),
        is_loaded=is_loaded,
        expires=expires,
    )


def rows_of(state: State) -> list[Row]:
    """One row for each name of the server's model."""
    if state.engine is None:
        return [Row(name, state.started) for name in state.names]
    known, path = meta(state.engine), state.engine.model.path
    return [row_of(name, path, known, is_loaded=True) for name in state.names]


def shown(engine: Engine, row: Row) -> dict[str, Any]:
    """POST /api/show.

    - `template` is the model's own, in Jinja. Where the model fills gaps, a comment in it names `.Suffix`, by which
      clients of Ollama know such models.
    - `parameters` has the size of the context, which clients take for theirs.
    """
    model = engine.model
    template = model.chat_template or ""
    if _fills_gaps(engine):
        template += "{#- .Suffix: this model fills gaps -#}"
    parameters = f"num_ctx {engine.n_ctx}"
    return {
        "modelfile": f"# served by rest-local\nFROM {tagged(row.name)}\nPARAMETER {parameters}\n",
        "parameters": parameters,
        "template": template,
        "details": row.details,
        "model_info": model_info(model),
        "capabilities": capabilities(engine),
        "modified_at": written(row.modified),
        "license": model.metadata.get("general.license", ""),
    }


def model_info(model: Model) -> dict[str, Any]:
    """The keys of the model's file with typed values. Lists, and texts beyond MAX_TEXT, are null."""
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
    """What the model can, in Ollama's words."""
    model = engine.model
    found = ["completion"] if engine.generates else []
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
    return None not in (vocabulary.fim_prefix, vocabulary.fim_suffix, vocabulary.fim_middle)
