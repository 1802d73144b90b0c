"""Tell the kinds of heads apart, and draft with MTP layers (NextN blocks) and EAGLE-3. DFlash is in `blocks`.

- An MTP layer reads a token and the target's last hidden state of the token before it. It is in the target's own file
  or in a file of its own. One layer drafts all tokens of a path; several are chained: layer i predicts the i-th drafted
  token (llama.cpp's way, too).
- An EAGLE-3 head is one decoder layer over the inputs of three layers of the target. Its encoder joins the three rows
  of a token to one, which its decoder reads with the next token. It may use the target's embeddings and output layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rest_local.drafting.models.blocks import DFlash
from rest_local.drafting.models.heads import Floats, Head, HeadText, LayerHead, Rows, settings_for
from rest_local.errors import ModelError, ModelInvalid, OptionError
from rest_local.llama import features as states
from rest_local.llama.context import ABORTED, MAX_OUTPUTS, Context
from rest_local.llama.gguf import read_gguf
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions

log = logging.getLogger("rest_local.drafting")


class Mtp(Head):
    """The MTP layers of a model, or of a file of their own."""

    name = "MTP layer"

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """Draft with `model`, loaded with its MTP layers; the same as `target_model` for layers in its file.

        Raises ModelError if llama.cpp cannot compute with them, OptionError for the layers of another model.
        """
        self.target_model = target_model
        if model.n_embd != target_model.n_embd:
            raise OptionError(
                f"MTP layers {model.path}: they read {model.n_embd} numbers for each token, and the model gives "
                f"{target_model.n_embd}; they belong to another model"
            )
        if lacking := states.missing(states.NEXTN):
            raise ModelError(
                f"MTP layers {model.path}: they need {lacking[0]}, which this llama.cpp lacks; install a newer one"
            )
        self.n_layers = max(states.n_mtp_layers(model), 1)
        if self.n_layers > 1 and states.missing([states.OFFSET]):
            log.warning(
                "MTP layers %s: this llama.cpp lacks %s; drafting with the first of %d layers alone",
                model.path, states.OFFSET, self.n_layers,
            )  # fmt: skip
            self.n_layers = 1
        self.depths = self.n_layers
        settings = settings_for(target, n_texts)
        context = Context(model, settings, mtp=True, other=target, n_features=model.n_embd)
        try:
            states.give_nextn(target, every_token=True)
            states.give_nextn(context, every_token=False)
            super().__init__(model, context, target, model.n_embd)
        except BaseException:
            context.close()
            raise

    def features(self, n: int) -> Floats:
        """Return the last hidden states of the target's last batch, a view of float32 [n, n_embd]."""
        return states.nextn_rows(self.target, n, self.width)

    def spoil(self, n: int) -> None:
        """Overwrite the features of the target's last batch."""
        states.nextn_rows(self.target, n, self.width)[:] = np.nan

    def text(self) -> HeadText:
        """Make a new, empty text, chained if there are several layers."""
        text = super().text()
        return ChainedText(self, text.seq) if self.n_layers > 1 else text

    def _evaluate(self, asked: Sequence[tuple[HeadText, tuple[int, ...]]]) -> tuple[int, int]:
        """Evaluate what is missing of these paths; with several layers, a whole chain for each text that has none."""
        if self.n_layers == 1:
            return super()._evaluate(asked)
        left = [text for text in {id(text): text for text, _ in asked}.values() if text.can_ask and text.passes(())]
        n_texts = len(left)
        while left:
            together: list[ChainedText] = []
            room = self.context.max_outputs
            while left and (needed := left[0].n_waiting + self.n_layers) <= room:
                room -= needed
                text = left.pop(0)
                assert isinstance(text, ChainedText)
                together.append(text)
            if not together or not self._draft(together):
                return 0, 0
        return n_texts, self.n_layers

    def _draft(self, texts: Sequence[ChainedText]) -> bool:
        """Draft a chain for each text, a token with each layer. False if that failed."""
        for layer in range(self.n_layers):
            batch = Rows()
            for text in texts:
                text.place_waiting(batch, text.n_waiting)
            for text in texts:
                text.place_chain(batch)
            if not self._run_layer(layer, batch):
                return False
        for text in texts:
            text.commit_pending()
        return True

    def _run(self, batch: Rows) -> bool:
        """Evaluate rows, with several layers each with all of them."""
        if self.n_layers == 1:
            return super()._run(batch)
        return all(self._run_layer(layer, batch) for layer in range(self.n_layers))

    def _run_layer(self, layer: int, batch: Rows) -> bool:
        """Evaluate rows with one layer. Those that wait come first, and cells are taken in the order of the rows, so
        each layer finds its own contents in the same cells.
        """
        for text in {id(text): text for text in batch.texts}.values():
            text.drop_uncommitted()
        states.use_mtp_layer(self.context, layer)
        try:
            return super()._run(batch)
        finally:
            states.use_mtp_layer(self.context, 0)


class ChainedText(HeadText):
    """The text of one slot in the cells of chained layers.

    Each layer has contents of its own in the cells. So a waiting pair is evaluated once for each layer, and a path of
    length d by layer d alone, from the root on: root and path are evaluated anew for each further token. So a chain is
    drafted as a block, and there is one in a step, without branches. The pairs below `_done` are in the cells of every
    layer, and nothing after them of more than one, so the root of a step is a waiting pair of the next one.
    """

    def __init__(self, drafter: Head, seq: int) -> None:
        """Begin an empty text, whose first sequence id is `seq`."""
        super().__init__(drafter, seq)
        self.following = self.likely

    def passes(self, path: Sequence[int]) -> int:
        """Return a decode for each layer, or 0 if the chain of this step is known or ends before."""
        return self._head.n_layers if not self._states and len(path) < self._head.n_layers else 0

    def commit_pending(self) -> None:
        """Note that the pending pairs are in the cells for every layer."""
        self._done = self._seen
        self._pending.clear()

    def place_chain(self, batch: Rows) -> None:
        """Add the root and what is drafted after it to a pass."""
        path: tuple[int, ...] = ()
        hidden = [self._before_root()]
        while path in self._states:
            _, state, likely = self._states[path]
            path = (*path, likely[0][0])
            hidden.append(state)
        root = len(self._text) - 1
        self._tips[self.seq] = path
        for i, (token, state) in enumerate(zip((int(self._text[root]), *path), hidden, strict=True)):
            place, last = self._head.place_of(root + i), i == len(path)
            batch.add(self, path, token, place, self.seq, state, own=i > 0, wanted=last)


class Eagle3(LayerHead):
    """An EAGLE-3 head."""

    name = "EAGLE-3 head"
    shift = 1
    has_last, n_read = True, 3

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """Draft with `model`. Raises as `LayerHead`."""
        super().__init__(model, target, target_model, n_texts, model.n_embd)

    def target_width(self, model: Model) -> int:
        """Return how many numbers of each layer it reads."""
        return int(model.metadata.get("eagle3.target_hidden_size", self.target_model.n_embd))

    def prepare(self, context: Context) -> None:
        """Let its context give the states of the head."""
        states.give_nextn(context, every_token=False)

    def encoded(self, rows: Floats) -> Floats | None:
        """Join the rows of three layers by the encoder, in parts, because it reserves logits for each row."""
        parts = []
        for begin in range(0, len(rows), MAX_OUTPUTS):
            part = rows[begin : begin + MAX_OUTPUTS]
            code = states.encode(self.context, part)
            if code:
                if code != ABORTED:
                    self.give_up(f"cannot be evaluated (llama_encode: {code})")
                return None
            parts.append(states.nextn_rows(self.context, len(part), self.n_hidden).copy())
        return np.concatenate(parts)


Kind = Literal["model", "mtp", "eagle3", "dflash"]
# By the architecture in the file: heads, and those that draft in ways that nothing here drives.
DRIVEN: dict[str, Kind] = {"eagle3": "eagle3", "dflash": "dflash"}
OTHERS = {"gemma4-assistant": "Gemma assistant", "medusa": "Medusa", "hass": "HASS"}


def kind_of(path: Path) -> Kind:
    """Tell what a file drafts as.

    Raises ModelNotFound, ModelInvalid; OptionError for one that nothing here can drive.
    """
    content = read_gguf(path, tensors=True)
    if (name := OTHERS.get(content.architecture)) is not None:
        raise OptionError(
            f"model {path}: {name} heads are not supported; give an EAGLE-3 head, MTP layers, a DFlash drafter or a "
            "model"
        )
    return DRIVEN.get(content.architecture, "mtp" if content.is_mtp_alone else "model")


def check_is_model(path: Path) -> None:
    """Raise ModelInvalid for a file that holds a head, and not a model that can answer."""
    content = read_gguf(path, tensors=True)
    names = {kind: f"a {name} head" for kind, name in OTHERS.items()}
    names |= {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash drafter"}
    held = "MTP layers" if content.is_mtp_alone else names.get(content.architecture)
    if held:
        raise ModelInvalid(
            path, f"holds {held} and no model that can answer", "give it as the draft model of its model"
        )


HEADS: dict[str, type[Mtp] | type[Eagle3] | type[DFlash]] = {"mtp": Mtp, "eagle3": Eagle3, "dflash": DFlash}


def open_head(
    kind: str, path: Path | None, target: Context, model: Model, n_texts: int, n_gpu_layers: int | None
) -> Head:
    """Open a head for `n_texts` texts of `model`, in the file at `path`; with None the MTP layers in the file of
    `model`, which was loaded with them. Raises ModelError, OptionError for the head of another model.
    """
    make = HEADS[kind]
    if path is None:
        return make(model, target, model, n_texts)
    own = Model.open(path, n_gpu_layers=n_gpu_layers, options=ModelOptions(), mtp=make is Mtp, is_head=True)
    try:
        if own.vocabulary.hash != model.vocabulary.hash:
            raise OptionError(f"{make.name} {path}: its vocabulary is not the model's; it is of another")
        return make(own, target, model, n_texts)
    except BaseException:
        own.close()
        raise
