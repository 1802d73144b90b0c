"""The inside of an engine whose model reads a text in both directions: it makes vectors or scores, and no text.

Such a model has no KV cache and no logits, so there is nothing to measure, to draft or to verify. The engine holds the
weights and the vocabulary; `rest_local.llama.embedding` computes with them. Every request to generate is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rest_local.catalog.stores import model_file
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import EngineCore
from rest_local.decoding.counts import Totals
from rest_local.decoding.offers import Offers
from rest_local.decoding.request import Request
from rest_local.errors import CannotGenerate, ModelError, ModelInvalid
from rest_local.llama.embedding import longest_text, pooling_of
from rest_local.llama.gguf import read_gguf
from rest_local.llama.model import Model

if TYPE_CHECKING:
    from rest_local.kv_cache.slot import Slot


def is_encoder(path: Path) -> bool:
    """Whether the file says that its model reads in both directions. False for what is no model."""
    try:
        return read_gguf(path).is_encoder
    except (ModelError, OSError):
        return False


class NoLanes:
    """The lanes of an engine that decodes nothing."""

    warnings: Sequence[str] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def sequences(self) -> Iterator[Any]:
        """None."""
        return iter(())


class PooledCore(EngineCore):
    """Opens the model, and owns it until `close`. Raises ModelError, also for a model that pools nothing."""

    generates = False
    projector = None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = Model.open(model_file(config.model), n_gpu_layers=config.n_gpu_layers, options=config.options)
        if pooling_of(self.model) is None:
            path = self.model.path
            self.model.close()
            raise ModelInvalid(
                path, "reads text in both directions and names no pooling, so it makes neither text nor vectors"
            )
        self.lanes = NoLanes()  # type: ignore[assignment]
        self.datastores, self._failed_stores, self._persisted, self.projector = [], [], None, None
        self.totals, self.offers, self.follower = Totals(), Offers(), None

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("lane", "predictions"):  # what only decoding has
            raise CannotGenerate(ranks=pooling_of(self.model) == "rank")
        raise AttributeError(name)

    @property
    def n_ctx(self) -> int:
        """Tokens of one text."""
        return longest_text(self.model)

    @property
    def slots(self) -> Sequence[Slot]:
        """None."""
        return ()

    def prepare(self, request: Request) -> NoReturn:
        """Raises CannotGenerate."""
        raise CannotGenerate(ranks=pooling_of(self.model) == "rank")

    def statistics(self) -> dict[str, Any]:
        """As `EngineCore.statistics`, of what was never done."""
        return {**self.totals.to_dict(), "passes": 0, "cells_used": 0, "cells": 0, "cost_curve_age_s": 0.0}

    def stall_for(self, milliseconds: float) -> None:
        """Nothing has steps."""

    def close(self) -> None:
        """Free the weights; again does nothing."""
        self.offers.close()
        self.model.close()
        for store in self.datastores:
            store.close()


def open_core(config: EngineConfig, unusable: Any = None) -> EngineCore:
    """The core for the model of a config. Raises as both."""
    if is_encoder(model_file(config.model)):
        return PooledCore(config)
    return EngineCore(config, unusable)
