"""rest-local: local GGUF models, faster by drafting from text that was written before, with the same output.

    from rest_local import Engine, Model, build_datastore

    with Model.open("model.gguf", vocab_only=True) as model:
        build_datastore("mycode", ["~/src/mycode"], vocabulary=model.vocabulary)
    with Engine.load("model.gguf", datastores=["mycode"]) as engine:
        stream = engine.generate("def main():", max_tokens=100)
        for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.result.draft.tokens_per_step)

Names are loaded on first use (PEP 562), so that `import rest_local` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Piece, Result, Stream
    from rest_local.decoding.request import Request
    from rest_local.decoding.service import Service
    from rest_local.errors import RestLocalError
    from rest_local.llama.model import Model
    from rest_local.llama.options import Adapter, ModelOptions
    from rest_local.llama.sampling import Sampling
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.indexing import build_datastore

__all__ = [
    "Adapter",
    "Datastore",
    "Engine",
    "Model",
    "ModelOptions",
    "Piece",
    "Request",
    "RestLocalError",
    "Result",
    "Sampling",
    "Service",
    "Stream",
    "__version__",
    "build_datastore",
]

_HOME = {
    "Adapter": "rest_local.llama.options",
    "Datastore": "rest_local.retrieval.datastore",
    "Engine": "rest_local.decoding.engine",
    "Model": "rest_local.llama.model",
    "ModelOptions": "rest_local.llama.options",
    "Piece": "rest_local.decoding.engine",
    "Request": "rest_local.decoding.request",
    "RestLocalError": "rest_local.errors",
    "Result": "rest_local.decoding.engine",
    "Sampling": "rest_local.llama.sampling",
    "Service": "rest_local.decoding.service",
    "Stream": "rest_local.decoding.engine",
    "build_datastore": "rest_local.retrieval.indexing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
