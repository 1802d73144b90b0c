"""Drafting with an EAGLE-3 head: one decoder layer over the inputs of three layers of the target.

The head's encoder joins the three rows of a token to one, which its decoder reads with the next token. It may use the
target's embeddings and output layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rest_local.drafting.models.heads import ABORTED, Floats, Head
from rest_local.errors import ModelError, OptionError
from rest_local.llama import features as states
from rest_local.llama.context import MAX_OUTPUTS, Context
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions

N_LAYERS = 3


class Eagle3(Head):
    """An EAGLE-3 head."""

    name = "EAGLE-3 head"
    shift = 1

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """Raises ModelError if llama.cpp cannot compute with the head, OptionError for the head of another model."""
        self._target_model = target_model
        if lacking := states.missing((*states.NEXTN, *states.LAYERS)):
            raise ModelError(f"EAGLE-3 heads need {lacking[0]}, which this llama.cpp lacks; install a newer one")
        self.layers = states.target_layers(model)
        width = int(model.metadata.get("eagle3.target_hidden_size", target_model.n_embd))
        if len(self.layers) != N_LAYERS or max(self.layers) > target_model.n_layer or width != target_model.n_embd:
            raise OptionError(
                f"EAGLE-3 head {model.path}: it reads layers {self.layers} of {width} numbers, and the model has "
                f"{target_model.n_layer} layers of {target_model.n_embd}; it belongs to another model"
            )
        settings = self.settings(target, n_texts)
        context = Context(model, settings, other=target, n_features=model.n_embd)
        try:
            self._inner = [layer for layer in self.layers if layer < target_model.n_layer]
            states.give_layers(target, self._inner)
            if len(self._inner) < N_LAYERS:  # the output of the last layer
                states.give_nextn(target, every_token=True)
            states.give_nextn(context, every_token=False)
            super().__init__(model, context, target, N_LAYERS * target_model.n_embd)
        except BaseException:
            context.close()
            raise

    @classmethod
    def open(
        cls, path: Path, target: Context, target_model: Model, n_texts: int, n_gpu_layers: int | None = None
    ) -> Eagle3:
        """Load a head. Raises ModelError, OptionError for the head of another model."""
        model = Model.open(path, n_gpu_layers=n_gpu_layers, options=ModelOptions(), is_head=True)
        try:
            if model.vocabulary.hash != target_model.vocabulary.hash:
                raise OptionError(f"EAGLE-3 head {path}: its vocabulary is not the model's; it is of another")
            return cls(model, target, target_model, n_texts)
        except BaseException:
            model.close()
            raise

    @property
    def target_model(self) -> Model:
        """The model that the head drafts for."""
        return self._target_model

    def features(self, n: int) -> Floats:
        """The inputs of the three layers in the target's last batch, one after the other: float32 [n, 3 * n_embd]."""
        return np.concatenate(self._rows(n), axis=1)

    def spoil(self, n: int) -> None:
        """Overwrite the features of the target's last batch."""
        for rows in self._rows(n):
            rows[:] = np.nan

    def _rows(self, n: int) -> list[Floats]:
        width = self._target_model.n_embd
        rows = [states.layer_rows(self.target, layer, n, width) for layer in self._inner]
        if len(self._inner) < N_LAYERS:
            rows.append(states.nextn_rows(self.target, n, width))
        return rows

    def encoded(self, rows: Floats) -> Floats | None:
        """The rows of three layers joined by the encoder, in parts: it reserves logits for each row."""
        parts = []
        for begin in range(0, len(rows), MAX_OUTPUTS):
            part = rows[begin : begin + MAX_OUTPUTS]
            code = self.context.encode(part)
            if code:
                if code != ABORTED:
                    self.give_up(f"cannot be evaluated (llama_encode: {code})")
                return None
            parts.append(states.nextn_rows(self.context, len(part), self.n_hidden).copy())
        return np.concatenate(parts)
