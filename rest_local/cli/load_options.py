"""How a model is loaded and computed, by llama.cpp's usual names: the same options on every command that loads one.

`load_options` hands them to the command as one `ModelOptions`, the argument `load`. What is not given is chosen: by
llama.cpp, or by measuring (`rest_local.calibration.tuning`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from rest_local.cli import completion
from rest_local.cli.sections import in_section, with_options
from rest_local.errors import OptionError
from rest_local.llama.options import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    NUMA,
    ROPE_SCALINGS,
    SPLIT_MODES,
    Adapter,
    ModelOptions,
    Override,
    Placement,
    Rope,
)

Command = Callable[..., Any]

SECTIONS = ("Loading", "Devices", "Computing")
_loading, _devices, _computing = (in_section(title, rare=True) for title in SECTIONS)
_DEFAULT = ModelOptions()

_OPTIONS = (
    _loading("--lora FILE", "LoRA adapter to apply; may be repeated.", multiple=True),
    _loading(
        "--lora-scaled FILE:SCALE",
        "LoRA adapter, by this strength; may be repeated.",
        multiple=True,
        shell_complete=completion.paths,
    ),
    _loading(
        "--mmap/--no-mmap",
        "Map the model and large datastores, or read them into memory (network drives).",
        default=_DEFAULT.mmap,
    ),
    _loading("--mlock", "Keep the weights in memory; never swap them out."),
    _loading("--check-tensors", "Read and check every tensor."),
    _loading("--repack/--no-repack", "Rearrange weights for this CPU.", default=_DEFAULT.repack),
    _loading(
        "--override-kv KEY=TYPE:VALUE",
        "Another value for a key of the file; TYPE int, float, bool or str; may be repeated.",
        multiple=True,
    ),
    _devices(
        "-dev --device NAME,...",
        "GPUs to use, by the names that `rest-local doctor` gives; none: only the CPU. Default: all.",
        to="devices",
    ),
    _devices(
        "-sm --split-mode", f"How to use several GPUs. Default: {_DEFAULT.split_mode}.", type=click.Choice(SPLIT_MODES)
    ),
    _devices("-ts --tensor-split N0,N1,...", "Share of each GPU, for example 3,1."),
    _devices("-mg --main-gpu N", "The GPU for all, or for the rest.", type=click.IntRange(min=0)),
    _devices("-cmoe --cpu-moe", "Keep all experts in main memory."),
    _devices(
        "-ncmoe --n-cpu-moe N", "Keep the experts of the first N layers in main memory.", type=click.IntRange(min=0)
    ),
    _devices(
        "-ot --override-tensor PATTERN=BUFFER",
        "Place tensors whose name matches, for example 'ffn_.*_exps=CPU'; may be repeated.",
        multiple=True,
    ),
    _devices("--numa", "Spread over the nodes of a NUMA machine.", type=click.Choice(NUMA)),
    _computing("-tb --threads-batch N", "CPU threads for more than one token."),
    _computing(
        "-fa --flash-attn",
        "Flash attention; auto: what verifies drafts cheapest here.",
        to="flash_attention",
        type=click.Choice(FLASH_ATTENTION),
        default=_DEFAULT.flash_attention,
    ),
    _computing(
        "-ctk --cache-type-k TYPE",
        f"Type of cached keys: {', '.join(CACHE_TYPES)}.",
        type=click.Choice(tuple(CACHE_TYPES)),
    ),
    _computing(
        "-ctv --cache-type-v TYPE",
        "Type of cached values, as for keys; a quantized one needs flash attention.",
        type=click.Choice(tuple(CACHE_TYPES)),
    ),
    _computing("-b --batch-size N", f"Tokens submitted at once. Default: {_DEFAULT.n_batch}.", to="n_batch"),
    _computing("-ub --ubatch-size N", "Tokens computed at once. Default: the same.", to="n_ubatch"),
    _computing(
        "--kv-offload/--no-kv-offload -kvo/-nkvo",
        "Keep the cache on the GPU, where there is one.",
        default=_DEFAULT.kv_offload,
    ),
    _computing("--rope-scaling", "Default: the model's.", to="scaling", type=click.Choice(ROPE_SCALINGS)),
    _computing("--rope-scale N", "Stretch the context N times.", type=float),
    _computing("--rope-freq-base N", "Default: the model's.", to="freq_base", type=float),
    _computing("--rope-freq-scale N", "1/N of --rope-scale.", to="freq_scale", type=float),
    _computing("--yarn-orig-ctx N", "Context the model was trained for.", type=click.IntRange(min=0)),
    _computing("--yarn-ext-factor N", "0: interpolate only. Default: the model's.", type=float),
    _computing("--yarn-attn-factor N", "Scale of the attention. Default: the model's.", type=float),
    _computing("--yarn-beta-slow N", "Default: the model's.", type=float),
    _computing("--yarn-beta-fast N", "Default: the model's.", type=float),
)

_ROPE = tuple(field.name for field in fields(Rope))
NAMES = ({field.name for field in fields(ModelOptions)} | {*_ROPE, "lora_scaled", "rope_scale"}) - {"rope"}


class LayerCount(click.ParamType):  # type: ignore[type-arg]  # older versions of click take no argument
    """Layers on the GPU, as llama.cpp takes them: a number, `all`, or `auto` for the default."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if isinstance(value, int) or value == "auto":
            return value if isinstance(value, int) else None
        if value == "all":
            return -1
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is no number of layers; give one, or all, or auto", param, ctx)


def model_options(values: Mapping[str, Any]) -> ModelOptions:
    """Return what the given options say; None is left to the default. Raises OptionError."""
    given = {name: value for name, value in values.items() if value is not None}
    rope = {name: given.pop(name) for name in _ROPE if name in given}
    if (scale := given.pop("rope_scale", None)) is not None:
        if "freq_scale" in rope:
            raise OptionError("--rope-scale and --rope-freq-scale say the same; give one of them")
        if not scale > 0:
            raise OptionError(f"--rope-scale {scale}: give a positive number")
        rope["freq_scale"] = 1 / scale
    shares = given.pop("tensor_split", "")
    try:
        tensor_split = tuple(float(share) for share in re.split("[,/]", shares)) if shares else ()
    except ValueError:
        raise OptionError(f"--tensor-split {shares}: give a share for each GPU, for example 3,1") from None
    return ModelOptions(
        devices=tuple(name.strip() for name in given.pop("devices", "").split(",") if name),
        rope=Rope(**rope),
        lora=(*map(Adapter, given.pop("lora", ())), *map(Adapter.parse, given.pop("lora_scaled", ()))),
        override_kv=tuple(map(Override.parse, given.pop("override_kv", ()))),
        override_tensor=tuple(map(Placement.parse, given.pop("override_tensor", ()))),
        tensor_split=tensor_split,
        **given,
    )


def load_options(command: Command) -> Command:
    """Add the options of this module; the argument is `load`."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        load = model_options({name: values.pop(name) for name in NAMES})
        return command(load=load, **values)

    return with_options(_OPTIONS, gathered)
