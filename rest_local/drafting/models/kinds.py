"""What a file that is given to draft with is: a draft model, MTP layers, an EAGLE-3 head, or something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rest_local.drafting.models.eagle3 import Eagle3
from rest_local.drafting.models.heads import Head
from rest_local.drafting.models.mtp import Mtp
from rest_local.errors import ModelInvalid, OptionError
from rest_local.llama.context import Context
from rest_local.llama.gguf import read_gguf
from rest_local.llama.model import Model

Kind = Literal["model", "mtp", "eagle3"]
EAGLE3 = "eagle3"
# Architectures that draft in ways that nothing here drives: by name in the file, what they are called.
OTHERS = {"dflash": "DFlash", "gemma4-assistant": "Gemma assistant", "medusa": "Medusa", "hass": "HASS"}


def kind_of(path: Path) -> Kind:
    """What a file drafts as. Raises ModelNotFound, ModelInvalid; OptionError for one that nothing here can drive."""
    content = read_gguf(path, tensors=True)
    if content.architecture == EAGLE3:
        return "eagle3"
    if (name := OTHERS.get(content.architecture)) is not None:
        raise OptionError(f"model {path}: {name} heads are not supported; give an EAGLE-3 head, MTP layers or a model")
    return "mtp" if content.is_mtp_alone else "model"


def check_is_model(path: Path) -> None:
    """Raise ModelInvalid for a file that holds a head, and not a model that can answer."""
    content = read_gguf(path, tensors=True)
    names = {EAGLE3: "an EAGLE-3 head", **{kind: f"a {name} head" for kind, name in OTHERS.items()}}
    held = "MTP layers" if content.is_mtp_alone else names.get(content.architecture)
    if held:
        raise ModelInvalid(
            path, f"holds {held} and no model that can answer", "give it as the draft model of its model"
        )


def open_mtp(path: Path | None, target: Context, model: Model, n_texts: int, n_gpu_layers: int | None) -> Head:
    """MTP layers from a file, or with None those in the file of `model`, which was loaded with them."""
    if path is None:
        return Mtp(model, target, model, n_texts)
    return Mtp.open(path, target, model, n_texts, n_gpu_layers)


def open_eagle3(path: Path | None, target: Context, model: Model, n_texts: int, n_gpu_layers: int | None) -> Head:
    """An EAGLE-3 head from a file."""
    assert path is not None
    return Eagle3.open(path, target, model, n_texts, n_gpu_layers)


OpenHead = Callable[[Path | None, Context, Model, int, int | None], Head]
HEADS: dict[str, OpenHead] = {"mtp": open_mtp, "eagle3": open_eagle3}
