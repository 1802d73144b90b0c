"""Tell the kinds of heads apart, and draft with MTP layers (NextN blocks), EAGLE-3 and Gemma assistants. DFlash is in
`blocks`.

- An MTP layer reads a token and the target's last hidden state of the token before it. It is in the target's own file
  or in a file of its own. One layer drafts all tokens of a path; several are chained: layer i predicts the i-th drafted
  token (llama.cpp's way, too).
- An EAGLE-3 head is one decoder layer over the inputs of three layers of the target. Its encoder joins the three rows
  of a token to one, which its decoder reads with the next token. It may use the target's embeddings and output layer.
- A Gemma assistant reads what an MTP layer reads, and attends to the cells of its target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from rest_local.drafting.models.blocks import DFlash
from rest_local.drafting.models.drafter import BATCH
from rest_local.drafting.models.heads import Floats, Head, HeadText, LayerHead, Rows, settings_for
from rest_local.errors import ModelError, ModelInvalid, OptionError
from rest_local.llama import features as states
from rest_local.llama.context import ABORTED, MAX_OUTPUTS, Context, ContextSettings
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
        width = self.width_of(model)
        if width != target_model.n_embd:
            raise OptionError(
                f"{self.name} {model.path}: it reads {width} numbers for each token, and the model gives "
                f"{target_model.n_embd}; it belongs to another model"
            )
        if lacking := states.missing(states.NEXTN):
            raise ModelError(
                f"{self.name} {model.path}: it needs {lacking[0]}, which this llama.cpp lacks; install a newer one"
            )
        self.n_layers = self.count_layers(model)
        if self.n_layers > 1 and states.missing([states.OFFSET]):
            log.warning(
                "MTP layers %s: this llama.cpp lacks %s; drafting with the first of %d layers alone",
                model.path, states.OFFSET, self.n_layers,
            )  # fmt: skip
            self.n_layers = 1
        self.depths = self.n_layers
        context = Context(model, self.settings(target, n_texts), mtp=True, other=target, n_features=width)
        try:
            states.give_nextn(target, every_token=True)
            states.give_nextn(context, every_token=False)
            super().__init__(model, context, target, width)
        except BaseException:
            context.close()
            raise

    def width_of(self, model: Model) -> int:
        """Return how many numbers of the target it reads for each token."""
        return model.n_embd

    def count_layers(self, model: Model) -> int:
        """Return how many layers are evaluated one after the other."""
        return max(states.n_mtp_layers(model), 1)

    def settings(self, target: Context, n_texts: int) -> ContextSettings:
        """Return the settings of its context."""
        return settings_for(target, n_texts)

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


class Assistant(Mtp):
    """An assistant of Gemma 4. It has no cells of its own: it attends to those of the last two layers of its target."""

    name = "Gemma assistant"

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """Draft with `model`. Raises as `Mtp`."""
        if (architecture := target_model.metadata["general.architecture"]) != "gemma4":
            raise OptionError(
                f"{self.name} {model.path}: it reads the cells of a gemma4, and the model is a "
                f"{architecture}; it belongs to another model"
            )
        windows = read_gguf(target_model.path).values.get("gemma4.attention.sliding_window_pattern")
        if not isinstance(windows, list) or [bool(each) for each in windows[-2:]] != [True, False]:
            # llama.cpp would read the cells of other layers without a word.
            raise OptionError(
                f"{self.name} {model.path}: it reads a layer with a window and then one without, and the last two of "
                "the model are others; it belongs to another model"
            )
        super().__init__(model, target, target_model, n_texts)
        self._free = list(range(0, target.n_slots * target.n_branches, target.n_branches))

    def width_of(self, model: Model) -> int:
        """Return how many numbers of the target it reads for each token."""
        return int(model.metadata["gemma4-assistant.embedding_length_out"])

    def count_layers(self, model: Model) -> int:
        """Return 1: all layers are one pass."""
        return 1

    def settings(self, target: Context, n_texts: int) -> ContextSettings:
        """Return those of the target, because its cells and sequence ids are the same."""
        return replace(target.settings, n_batch=min(BATCH, target.n_ctx), n_ubatch=0)

    def prepare_trial(self) -> None:
        """Put one token into the cells of the target, because the assistant can only attend to them."""
        self.target.clear()
        self.target.batch.fill([0], [0], 0, 1, [0])
        if code := self.target.decode():
            raise ModelError(f"the model cannot be evaluated (llama_decode: {code})")

    def load_trial(self, n: int) -> None:
        """Put the tokens of `n` queries after that token into the batch."""
        self.context.batch.load([0] * n, [1] * n, [0] * n, [1] * n, [1] * n)

    def text(self) -> HeadText:
        """Make a new, empty text for the next slot of the target. Raises ValueError if none are left."""
        return AssistantText(self, super().text().seq)


class AssistantText(HeadText):
    """The text of one slot, in the cells of the target.

    No pair waits, because the target has evaluated the tokens. A drafted token gets no cell, so all of them stand at
    the position of the root, with the sequence id of the slot; llama.cpp's driver does the same.
    """

    def take(self, start: int, tokens: Sequence[int], rows: Floats) -> None:
        """Take `tokens` that the target has committed at `start`, with the features `rows`, float32 [n, width]."""
        super().take(start, tokens, rows)
        self._done = self._seen
        self._pending.clear()

    def place_after(self, path: tuple[int, ...]) -> int:
        """Return the position of the root."""
        return len(self._text) - 1

    def seq_after(self, path: tuple[int, ...], place: int) -> int | None:
        """Return the sequence id of the slot."""
        return self.seq


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


Kind = Literal["model", "mtp", "eagle3", "dflash", "assistant"]
# By the architecture in the file: heads, and those that draft in ways that nothing here drives.
DRIVEN: dict[str, Kind] = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "assistant"}
OTHERS = {"medusa": "Medusa", "hass": "HASS"}


def kind_of(path: Path) -> Kind:
    """Tell what a file drafts as.

    Raises ModelNotFound, ModelInvalid; OptionError for one that nothing here can drive.
    """
    content = read_gguf(path, tensors=True)
    if (name := OTHERS.get(content.architecture)) is not None:
        raise OptionError(
            f"model {path}: {name} heads are not supported; give an EAGLE-3 head, MTP layers, a DFlash drafter, a "
            "Gemma assistant or a model"
        )
    return DRIVEN.get(content.architecture, "mtp" if content.is_mtp_alone else "model")


def check_is_model(path: Path) -> None:
    """Raise ModelInvalid for a file that holds a head, and not a model that can answer."""
    content = read_gguf(path, tensors=True)
    names = {kind: f"a {name} head" for kind, name in OTHERS.items()}
    names |= {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash drafter", "gemma4-assistant": "a Gemma assistant"}
    held = "MTP layers" if content.is_mtp_alone else names.get(content.architecture)
    if held:
        raise ModelInvalid(
            path, f"holds {held} and no model that can answer", "give it as the draft model of its model"
        )


HEADS: dict[str, type[Mtp] | type[Eagle3] | type[DFlash]] = {
    "mtp": Mtp,
    "eagle3": Eagle3,
    "dflash": DFlash,
    "assistant": Assistant,
}


def open_head(
    kind: str, path: Path | None, target: Context, model: Model, n_texts: int, n_gpu_layers: int | None
) -> Head:
    """Open a head for `n_texts` texts of `model`, in the file at `path`; with None the MTP layers in the file of
    `model`, which was loaded with them. Raises ModelError, OptionError for the head of another model.
    """
    make = HEADS[kind]
    if path is None:
        return make(model, target, model, n_texts)
    own = Model.open(path, n_gpu_layers=n_gpu_layers, options=ModelOptions(), mtp=issubclass(make, Mtp), is_head=True)
    try:
        if own.vocabulary.hash != model.vocabulary.hash or own.n_vocab > model.n_vocab:
            raise OptionError(f"{make.name} {path}: its vocabulary is not the model's; it is of another")
        return make(own, target, model, n_texts)
    except BaseException:
        own.close()
        raise
