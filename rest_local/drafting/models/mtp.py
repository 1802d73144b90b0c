"""Drafting with MTP layers (NextN blocks), in the target's own file or in a file of their own.

A layer reads a token and the target's last hidden state of the token before it. One layer drafts all tokens of a path.
Several are chained (`rest_local.drafting.models.chained`).
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from rest_local.drafting.models.chained import ChainedText
from rest_local.drafting.models.heads import Floats, Head, HeadText, Rows
from rest_local.errors import ModelError, OptionError
from rest_local.llama import features as states
from rest_local.llama.context import Context
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions

log = logging.getLogger("rest_local.drafting")


class Mtp(Head):
    """The MTP layers of a model, or of a file of their own."""

    name = "MTP layer"

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """`model`: loaded with its MTP layers. Raises ModelError if llama.cpp cannot compute with them."""
        self._target_model = target_model
        if lacking := states.missing(states.NEXTN):
            raise ModelError(f"MTP layers need {lacking[0]}, which this llama.cpp lacks; install a newer one")
        self.n_layers = max(states.n_mtp_layers(model), 1)
        if self.n_layers > 1 and states.missing([states.OFFSET]):
            log.warning(
                "MTP layers %s: this llama.cpp lacks %s; drafting with the first of %d layers alone",
                model.path, states.OFFSET, self.n_layers,
            )  # fmt: skip
            self.n_layers = 1
        settings = self.settings(target, n_texts)
        context = Context(model, settings, mtp=True, other=target, n_features=model.n_embd)
        try:
            states.give_nextn(target, every_token=True)
            states.give_nextn(context, every_token=False)
            super().__init__(model, context, target, model.n_embd)
        except BaseException:
            context.close()
            raise

    @classmethod
    def open(
        cls, path: Path, target: Context, target_model: Model, n_texts: int, n_gpu_layers: int | None = None
    ) -> Mtp:
        """Load MTP layers from a file of their own. Raises ModelError, OptionError for those of another model."""
        model = Model.open(path, n_gpu_layers=n_gpu_layers, options=ModelOptions(), mtp=True, is_head=True)
        try:
            if model.vocabulary.hash != target_model.vocabulary.hash:
                raise OptionError(f"MTP layers {path}: their vocabulary is not the model's; they are of another")
            if model.n_embd != target_model.n_embd:
                raise OptionError(
                    f"MTP layers {path}: they read {model.n_embd} numbers for each token, and the model gives "
                    f"{target_model.n_embd}; they belong to another model"
                )
            return cls(model, target, target_model, n_texts)
        except BaseException:
            model.close()
            raise

    @property
    def target_model(self) -> Model:
        """The model that the layer drafts for; with layers in its file, the same as `model`."""
        return self._target_model

    def features(self, n: int) -> Floats:
        """The last hidden states of the target's last batch, a view of float32 [n, n_embd]."""
        return states.nextn_rows(self.target, n, self.width)

    def spoil(self, n: int) -> None:
        """Overwrite the features of the target's last batch."""
        states.nextn_rows(self.target, n, self.width)[:] = np.nan

    def _new_text(self, seq: int) -> HeadText:
        return ChainedText(self, seq) if self.n_layers > 1 else HeadText(self, seq)

    def _run(self, batch: Rows) -> bool:
        if self.n_layers > 1 and not batch.layer:
            batch.n_waiting = batch.move_outputs_back()
        return super()._run(batch)

    def _decode(self, batch: Rows, hidden: Floats) -> int:
        """Evaluate rows, those that wait with every layer. These come first in each decode, and cells are taken in the
        order of the rows, so each layer finds its own contents in the same cells.
        """
        if self.n_layers == 1:
            return super()._decode(batch, hidden)
        catching_up = range(self.n_layers - 1, 0, -1) if batch.n_waiting else ()
        parts = [(layer, batch.n_waiting, False) for layer in catching_up]
        try:
            for layer, n, wanted in (*parts, (batch.layer or 0, len(batch.tokens), bool(batch.outputs))):
                for text in {id(text): text for text in batch.texts}.values():
                    text.drop_uncommitted()
                states.use_mtp_layer(self.context, layer)
                if code := self._decode_first(n, batch, hidden, wanted):
                    return code
            return 0
        finally:
            states.use_mtp_layer(self.context, 0)
