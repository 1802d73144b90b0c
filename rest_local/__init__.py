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

# ruff: noqa: F403, F405 - `__all__` lists the public errors

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rest_local.catalog.describe import list_models
    from rest_local.catalog.hub import pull_model
    from rest_local.catalog.stores import find_model
    from rest_local.decoding.batch import Finished
    from rest_local.decoding.config import EngineConfig
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.request import Request
    from rest_local.decoding.results import DraftStatistics, Lookups, SourceCounts, Timings
    from rest_local.decoding.service import Service
    from rest_local.decoding.stream import Piece, Result
    from rest_local.decoding.streaming import ChatStream, Stream
    from rest_local.decoding.verify import Relaxed
    from rest_local.drafting.origins import Origin
    from rest_local.errors import *
    from rest_local.grammar.grammar import Grammar, gbnf, json_schema, lark
    from rest_local.llama.model import Model
    from rest_local.llama.options import Adapter, ModelOptions, Override, Placement, Rope, Sampling
    from rest_local.retrieval.building.indexing import build_datastore
    from rest_local.retrieval.datastore import Datastore

__all__ = [
    "Adapter", "AdapterInvalid", "CannotGenerate", "ChatStream", "ClusterFailed", "ConfigInvalid", "CorpusEmpty",
    "CorpusTooLarge", "Datastore", "DatastoreCorrupt", "DatastoreError", "DatastoreExists", "DatastoreLocked",
    "DatastoreNotFound", "DatastoreUnwritable", "DatastoreVersion", "DatastoreVocabulary", "DecodeFailed",
    "DownloadFailed", "DraftStatistics", "EditRefused", "Engine", "EngineConfig", "Finished", "GenerationError",
    "Grammar", "GrammarsBusy", "HistoryNotFound", "HubError", "InputInvalid", "LibraryUnfit",
    "Lookups", "Model", "ModelError", "ModelInvalid", "ModelNotFound", "ModelNotHere", "ModelOptions",
    "OptionError", "Origin", "OutputInvalid", "OutputUnwritable", "Override", "Piece", "Placement", "ProjectorInvalid",
    "PromptEmpty", "PromptTooLong", "QueueFull", "ReaderTooSlow", "Relaxed", "Request", "RestLocalError", "Result",
    "Rope", "Sampling", "Service", "ServiceClosed", "SourceCounts", "Stream", "TemplateFailed",
    "TemplateTooCostly", "Timings", "TokenLogprobs", "Unexpected", "__version__", "build_datastore", "find_model",
    "gbnf", "json_schema", "lark", "list_models", "pull_model",
]  # fmt: skip

_HOMES = {
    "rest_local.catalog.describe": ("list_models",),
    "rest_local.catalog.stores": ("find_model",),
    "rest_local.catalog.hub": ("pull_model",),
    "rest_local.decoding.batch": ("Finished",),
    "rest_local.decoding.config": ("EngineConfig",),
    "rest_local.decoding.engine": ("Engine",),
    "rest_local.decoding.logprobs": ("TokenLogprobs",),
    "rest_local.decoding.request": ("Request",),
    "rest_local.decoding.service": ("Service",),
    "rest_local.decoding.results": ("DraftStatistics", "Lookups", "SourceCounts", "Timings"),
    "rest_local.decoding.stream": ("Piece", "Result"),
    "rest_local.decoding.streaming": ("ChatStream", "Stream"),
    "rest_local.decoding.verify": ("Relaxed",),
    "rest_local.drafting.origins": ("Origin",),
    "rest_local.grammar.grammar": ("Grammar", "gbnf", "json_schema", "lark"),
    "rest_local.llama.model": ("Model",),
    "rest_local.llama.options": ("Adapter", "ModelOptions", "Override", "Placement", "Rope", "Sampling"),
    "rest_local.retrieval.datastore": ("Datastore",),
    "rest_local.retrieval.building.indexing": ("build_datastore",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_HOME |= {name: "rest_local.errors" for name in __all__ if name not in {*_HOME, "__version__"}}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
