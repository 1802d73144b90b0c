"""The options that several commands share, declared once: those of the engine, of sampling, and sizes and times.

A command receives one `config` (`EngineConfig`) instead of thirty arguments, whose `sampling` has the sampling options
that were given. The parameters have the names of their fields, and take their defaults from them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion
from rest_local.cli.inputs import read_grammar
from rest_local.cli.sections import Decorator, in_section, option, rare_option, with_options
from rest_local.decoding.config import AUTO_PROJECTOR, POLICY_NAMES, TRAINED, EngineConfig
from rest_local.errors import OptionError
from rest_local.llama.options import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    LEAST_DEFAULT,
    MOST_SNAPSHOTS,
    NUMA,
    ROPE_SCALINGS,
    SPLIT_MODES,
    Adapter,
    ModelOptions,
    Override,
    Placement,
    Rope,
)
from rest_local.llama.sampling_defaults import DEFAULTS, RECOMMENDED, sampler_order

if TYPE_CHECKING:
    from rest_local.decoding.verify import Relaxed

Command = Callable[..., Any]

STRICT = "strict"
MODEL_HELP = "GGUF file, name (`rest-local models`) or user/repo:QUANT. Default: SmolLM2."
_CONFIG = EngineConfig()


def _parse_biases(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> tuple[tuple[int, float], ...] | None:
    """Parse TOKEN=BIAS: a token id, and the number that is added to its logit. -inf forbids the token."""
    pairs = []
    for value in values:
        token, _, bias = value.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not TOKEN=BIAS, for example 15=-1.5 or 15=-inf") from None
    return tuple(pairs) or None


def _check_stops(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """Refuse an empty text, which stops everywhere. It is a typing mistake or an unset variable of a script."""
    if "" in values:
        raise click.BadParameter("give some text to stop before, not an empty one")
    return tuple(values)


def _read_verify(ctx: click.Context, param: click.Parameter, value: str) -> Relaxed | None:
    """Parse `strict` (None) or `relaxed[:K,RATIO]`. Raises OptionError."""
    if value == STRICT:
        return None
    from rest_local.decoding.verify import Relaxed

    return Relaxed.parse(value)


class OneALine(click.types.StringParamType):
    """A text option whose environment variable holds one value a line, because names and paths may contain spaces."""

    envvar_list_splitter = "\n"


class Count(click.ParamType):  # type: ignore[type-arg]  # Older versions of click take no argument.
    """A number of what `name` says, or one of `words`, which stand for a number or (None) for the default."""

    def __init__(self, name: str, **words: int | None) -> None:
        self.name, self.words = name, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value in self.words:
            return self.words[value]
        try:
            return int(value)
        except ValueError:
            others = "".join(f", or {word}" for word in self.words)
            self.fail(f"{value!r} is not a number of {self.name}; give one{others}", param, ctx)


LAYERS = Count("layers", all=-1, auto=None)


SECTIONS = ("Loading", "Devices", "Computing")
_loading, _devices, _computing = (in_section(title, rare=True) for title in SECTIONS)
_LOADING = ModelOptions()

_LOAD_OPTIONS = (
    _loading("--lora FILE", "LoRA adapter to apply; may be repeated.", multiple=True),
    _loading(
        "--lora-scaled FILE:SCALE",
        "LoRA adapter with its strength; may be repeated.",
        multiple=True,
        shell_complete=completion.paths,
    ),
    _loading(
        "--mmap/--no-mmap",
        "Map the model and large datastores, or read them into memory (network drives).",
        default=_LOADING.mmap,
    ),
    _loading("--mlock", "Keep the weights in memory; never swap them out."),
    _loading("--check-tensors", "Read and check every tensor."),
    _loading("--repack/--no-repack", "Rearrange weights for this CPU.", default=_LOADING.repack),
    _loading(
        "--override-kv KEY=TYPE:VALUE",
        "Override a key of the model file. TYPE is int, float, bool or str; may be repeated.",
        multiple=True,
    ),
    _devices(
        "-dev --device NAME,...",
        "GPUs to use, as `rest-local doctor` names them; `none` uses only the CPU. Default: all.",
        to="devices",
    ),
    _devices(
        "-sm --split-mode", f"How to use several GPUs. Default: {_LOADING.split_mode}.", type=click.Choice(SPLIT_MODES)
    ),
    _devices("-ts --tensor-split N0,N1,...", "Share of each GPU, for example 3,1."),
    _devices("-mg --main-gpu N", "The GPU for the model, or for what is not split.", type=click.IntRange(min=0)),
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
        "Flash attention; auto takes what verifies drafts cheapest here.",
        to="flash_attention",
        type=click.Choice(FLASH_ATTENTION),
        is_flag=False,
        flag_value="on",  # Older versions of llama.cpp take no value.
        default=_LOADING.flash_attention,
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
    _computing("-b --batch-size N", f"Tokens submitted at once. Default: {_LOADING.n_batch}.", to="n_batch"),
    _computing("-ub --ubatch-size N", "Tokens computed at once. Default: the same.", to="n_ubatch"),
    _computing(
        "--kv-offload/--no-kv-offload -kvo/-nkvo",
        "Keep the KV cache on the GPU if there is one.",
        default=_LOADING.kv_offload,
    ),
    _computing(
        "--rollback N|auto",
        "Keep N snapshots of a hybrid or recurrent model's state for each slot, to take back N drafted tokens at once "
        f"(`rest-local models` says how large one is). Default: auto, as many as fit, at most {MOST_SNAPSHOTS}.",
        type=Count("snapshots", auto=None),
    ),
    _computing("--rope-scaling", "Default: the model's.", to="scaling", type=click.Choice(ROPE_SCALINGS)),
    _computing("--rope-scale N", "Stretch the context N times.", type=float),
    _computing("--rope-freq-base N", "Default: the model's.", to="freq_base", type=float),
    _computing("--rope-freq-scale N", "1/N of --rope-scale.", to="freq_scale", type=float),
    _computing("--yarn-orig-ctx N", "Context the model was trained for.", type=click.IntRange(min=0)),
    _computing("--yarn-ext-factor N", "0 only interpolates. Default: the model's.", type=float),
    _computing("--yarn-attn-factor N", "Scale of the attention. Default: the model's.", type=float),
    _computing("--yarn-beta-slow N", "Default: the model's.", type=float),
    _computing("--yarn-beta-fast N", "Default: the model's.", type=float),
)

_ROPE = tuple(field.name for field in fields(Rope))
NAMES = ({field.name for field in fields(ModelOptions)} | {*_ROPE, "lora_scaled", "rope_scale"}) - {"rope"}


def model_options(values: Mapping[str, Any]) -> ModelOptions:
    """Return the model options that were given. None leaves an option to its default. Raises OptionError."""
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
    """Add llama.cpp's options for loading and computing, as the argument `load`. Others are chosen by measuring."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        load = model_options({name: values.pop(name) for name in NAMES})
        return command(load=load, **values)

    return with_options(_LOAD_OPTIONS, gathered)


_engine, _sampling = in_section("Engine"), in_section("Sampling")


def device_options(option: Callable[..., Decorator]) -> tuple[Decorator, Decorator]:
    """Return `-t` and `-ngl`, made by `option`: `click.option` or the one of a section."""
    return (
        option(
            "-t --threads N",
            "Use exactly N CPU threads. Default: the performance cores, fewer while other programs want them.",
        ),
        option(
            "-ngl --gpu-layers --n-gpu-layers N|all|auto",
            "Layers on the GPU. Default: auto, which is all if there is a GPU.",
            to="n_gpu_layers",
            type=LAYERS,
        ),
    )


_MODEL_OPTION = _engine("-m --model MODEL", MODEL_HELP, also="-hf --hf-repo")
_MODELS_OPTION = _engine(
    "-m --model MODEL",
    "GGUF file, name (`rest-local models`), user/repo:QUANT, or a folder of models; repeatable. Requests name the "
    "model; the first is the default. Default: SmolLM2.",
    also="-hf --hf-repo",
    type=OneALine(),
    multiple=True,
)
_ENGINE_OPTIONS = (
    _engine(
        "-d --datastore DATASTORE",
        "Name or path of a datastore to draft from; may be repeated. Default: the one named 'default', if any.",
        to="datastores",
        multiple=True,
    ),
    _engine(
        "-c --ctx --ctx-size N",
        "Context in tokens; 0 is the trained length. Default: that, halved until the KV cache fits half of the memory "
        f"that the model leaves free, down to {LEAST_DEFAULT}.",
        to="n_ctx",
        callback=lambda ctx, param, value: TRAINED if value == 0 else value,
        type=click.IntRange(min=0),
    ),
    *device_options(_engine),
    _engine(
        "--policy",
        "When to draft: where it pays, never, or as a paper does.",
        rare=True,
        type=click.Choice(POLICY_NAMES),
        default=_CONFIG.policy,
    ),
    _engine(
        "-md --draft-model MODEL",
        "Also draft with this, when it pays: a smaller model of the same family, MTP layers, an EAGLE-3 head, or a "
        "DFlash drafter. "
        "`none` leaves out even the MTP layers in the model's own file.",
        also="--model-draft",
    ),
    _engine(
        "-ngld --draft-gpu-layers N|all|auto",
        "Layers of the draft model on the GPU. Default: auto, as with -ngl.",
        also="--gpu-layers-draft --n-gpu-layers-draft",
        rare=True,
        type=LAYERS,
    ),
    _engine(
        "--verify strict|relaxed[:K,RATIO]",
        "relaxed changes the output: a retrieved token passes if it is among the K likeliest and has RATIO of the "
        "greatest probability (3,0.3).",
        rare=True,
        default=STRICT,
        callback=_read_verify,
    ),
    _engine(
        "--exact/--no-exact",
        "Draft only if a self-test found no changed bit, or use the cheapest settings, in which a near-tie can differ. "
        "Default: exact on a CPU if a first test passes, else the cheapest settings.",
        default=None,
    ),
)


def _number(names: str, help: str, field: str = "", rare: bool = True) -> Decorator:
    """Declare an option for a number of `Sampling`, whose field is named as the flag or `field`."""
    name = field or names.split()[0].lstrip("-").replace("-", "_")
    default = DEFAULTS[name]
    others = "the model's, else " if name in RECOMMENDED else ""
    return _sampling(f"{names} N", f"{help} Default: {others}{default:g}.", to=name, rare=rare, type=type(default))


def _read_samplers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else sampler_order(filter(None, value.split(";")))


def _read_breakers(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[str, ...] | None:
    return () if tuple(values) == ("none",) else tuple(values) or None


_SAMPLING_NUMBERS = (
    _number("--temp --temperature", "Temperature; 0 is greedy, as in `edit`, and drafts fit more often.", "temperature",
            rare=False),
    _number("--top-k", "Sample among the N likeliest.", rare=False),
    _number("--top-p", "Nucleus sampling.", rare=False),
    _number("--min-p", "Least share of the top probability.", rare=False),
    _sampling("-s --seed N", "Seed of the draws. Default: another one every time.", type=int),
    _number("--repeat-penalty", "1 is none."),
    _number("--repeat-last-n", "Tokens that the penalties look back at."),
    _number("--presence-penalty", "0 is none."),
    _number("--frequency-penalty", "0 is none."),
    _number("--dry-multiplier", "DRY's penalty for repetitions; 0 is none."),
    _number("--dry-base", "DRY's penalty grows with this base."),
    _number("--dry-allowed-length", "Repetitions of up to N tokens get no DRY penalty."),
    _number("--dry-penalty-last-n", "Tokens that DRY looks back at; -1 means all."),
    _sampling(
        "--dry-sequence-breaker TEXT",
        "Text that ends a repetition; may be repeated. `none` means no text. Default: newline, colon, quote, asterisk.",
        to="dry_sequence_breakers",
        rare=True,
        multiple=True,
        callback=_read_breakers,
    ),
    _number("--typical-p --typical", "Locally typical sampling; 1 is off."),
    _number("--top-n-sigma --top-nsigma", "Keep logits within N standard deviations of the greatest; -1 is off."),
    _number("--xtc-probability", "How often XTC leaves out the likeliest tokens; 0 is off."),
    _number("--xtc-threshold", "XTC leaves out all tokens above it but the last; more than 0.5 is off."),
    _number("--dynatemp-range", "How much the temperature varies with the entropy; 0 is off."),
    _number("--dynatemp-exp", "Exponent of the entropy in dynatemp.", "dynatemp_exponent"),
    _number("--mirostat", "Use mirostat 1 or 2 in place of the other samplers; 0 is off."),
    _number("--mirostat-ent", "Surprise that mirostat aims at.", "mirostat_tau"),
    _number("--mirostat-lr", "Learning rate of mirostat.", "mirostat_eta"),
    _number("--adaptive-target", "Draw tokens near this probability; negative is off."),
    _number("--adaptive-decay", "How long adaptive-p remembers, 0 to 0.99."),
    _sampling(
        "--samplers NAMES",
        "Samplers in order, such as 'dry;top_k;temperature'; the others are off. Default: the model's, else all.",
        rare=True,
        callback=_read_samplers,
    ),
)  # fmt: skip
_SAMPLING_OPTIONS = (
    *_SAMPLING_NUMBERS,
    _sampling(
        "--logit-bias TOKEN=BIAS",
        "Add BIAS to the logit of a token id; may be repeated.",
        rare=True,
        multiple=True,
        callback=_parse_biases,
    ),
    _sampling("--grammar-file FILE", "Grammar that the answer must follow: Lark in a FILE.lark, else GBNF.", rare=True),
    option("--json-schema FILE", "JSON schema that the answer must be valid for.", also="-jf --json-schema-file"),
)

history_option = _engine(
    "--history/--no-history",
    "Draft from this model's earlier answers, and keep the new ones on disk (`rest-local history`).",
    default=True,
)
projector_option = _engine(
    "--mmproj FILE|auto|none",
    "Projector that lets the model take images; auto takes the mmproj file beside the model, if any.",
    also="-mm",
    rare=True,
    type=click.Path(path_type=Path),
    default=AUTO_PROJECTOR,
    shell_complete=completion.paths,
)
template_option = rare_option("--chat-template-file FILE", "Jinja template to use in place of the (first) model's own.")
stop_option = option("--stop TEXT", "Stop before this text; may be repeated.", multiple=True, callback=_check_stops)
quiet_option = option("-q --quiet", "Print no line about the speed.")


def tokens_option(default: int, help: str) -> Decorator:
    """Declare `-n`, with the names that llama.cpp and OpenAI use for it."""
    limit = click.IntRange(min=-1)
    return option("-n --tokens --n-predict --predict N", help, also="--max-tokens", type=limit, default=default)


def _engine_options(model_option: Decorator, several: bool = False) -> Decorator:
    def add(command: Command) -> Command:
        @functools.wraps(command)
        def gathered(*, load: ModelOptions, **values: Any) -> Any:
            if several:
                values["models"] = values.pop("model")
            given = {field.name: values.pop(field.name) for field in fields(EngineConfig) if field.name in values}
            return command(config=EngineConfig(**given, options=load), **values)

        return with_options((model_option, *_ENGINE_OPTIONS), load_options(gathered))

    return add


# These add the options of the engine and of loading its model, which become the argument `config`. Give such a command
# `cls=SectionedCommand`, so that its help stays readable. The second one passes `models` beside `config`.
engine_options = _engine_options(_MODEL_OPTION)
engine_options_of_models = _engine_options(_MODELS_OPTION, several=True)


def sampling_options(command: Command) -> Command:
    """Add the sampling options. Those that were given become `config.sampling`, and a grammar or schema becomes
    `grammar`.
    """

    @functools.wraps(command)
    def gathered(*, grammar_file: Path | None, json_schema: Path | None, **values: Any) -> Any:
        return command(grammar=read_grammar(grammar_file, json_schema), **values)

    return with_options(_SAMPLING_OPTIONS, _with_sampling(gathered))


def sampling_defaults(command: Command) -> Command:
    """Add the sampling options that are defaults of requests. They become `config.sampling`."""
    return with_options(_SAMPLING_NUMBERS, _with_sampling(command))


def _with_sampling(command: Command) -> Command:
    @functools.wraps(command)
    def gathered(*, config: EngineConfig, **values: Any) -> Any:
        given = {name: value for name in DEFAULTS if (value := values.pop(name, None)) is not None}
        return command(config=replace(config, sampling=given), **values)

    return gathered


_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


def size_of(text: str) -> int:
    """Return the bytes of a size such as `1500M` or `2G`. Units are powers of 1024. Raises ValueError."""
    text = text.strip().upper().removesuffix("B")
    unit = _UNITS.get(text[-1:], 0)
    size = float(text[:-1] if unit else text) * (1 << unit)
    if not 1 <= size < 1 << 62:
        raise ValueError(f"a size of {text}")
    return int(size)


def size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Convert the value of an option for a size."""
    try:
        return None if text is None else size_of(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a size; give one like 2G or 1500M") from error


def size_or_none(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Convert the value of an option for a size that may be 0."""
    return 0 if text.strip() == "0" else size(context, parameter, text) or 0


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Convert the value of an option for a time such as `90s`, `10m` or `2h` to seconds, and 0 to None."""
    if text is None or text == "0":
        return None
    unit = _SECONDS.get(text[-1:].lower())
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
        if not 0 < seconds < 1e9:
            raise ValueError(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time; give one like 90s, 10m or 2h, or 0 for never") from error
    return seconds


memory_option = option(
    "--memory SIZE", "Memory that the build may take, such as 600M. Default: 1.5 GB for large text.", callback=size
)
ray_option = option(
    "--ray ADDRESS",
    "Tokenize on a Ray cluster: `auto` for the one that this machine is a node of, host:port, or `local`. Needs "
    "rest-local[ray].",
)
