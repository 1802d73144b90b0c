"""Define the options of loading, computing and sampling that a user may fix, under llama.cpp's usual names.

Contract: frozen values, checked when they are made as far as that needs no model. llama.cpp or a measurement
(`rest_local.calibration.tuning`) chooses the values of defaults. Imports nothing heavy, so that the command line can
declare its options from here. Knows nothing of llama.cpp's structures (`rest_local.llama.loading`,
`rest_local.llama.sampler`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rest_local.errors import OptionError
from rest_local.grammar.grammar import Grammar

# enum ggml_type, as llama.cpp's own command line offers them. It refuses others, or they were never tried there.
CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7,
}  # fmt: skip
FLOAT_CACHE_TYPES = ("f32", "f16", "bf16")
FLASH_ATTENTION = ("auto", "on", "off")
SPLIT_MODES = ("none", "layer", "row", "tensor")  # enum llama_split_mode
NUMA = ("distribute", "isolate", "numactl")
ROPE_SCALINGS = ("none", "linear", "yarn")  # enum llama_rope_scaling_type
OVERRIDE_TYPES = ("int", "float", "bool", "str")
LONGEST_OVERRIDE = 127  # bytes of a key, and of a string, in llama_model_kv_override
MOST_SNAPSHOTS = 16  # default number of snapshots of a recurrent state, for each slot
LARGEST_ROLLBACK = 63  # no chain has more tokens
LEAST_DEFAULT = 4096  # The default context has at least so many tokens, or those that the model was trained for.


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. `scale` is its strength: 1 as trained, 0 not at all."""

    path: Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise OptionError(f"LoRA adapter {self.path}: a scale of {self.scale}; give a finite number")

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Parse FILE:SCALE; the last colon separates.

        Raises:
            OptionError: the text is not of this form
        """
        path, _, scale = text.rpartition(":")
        try:
            value = float(scale)
        except ValueError:
            path = ""
        if not path:
            raise OptionError(f"LoRA adapter {text!r}: give FILE:SCALE, for example style.gguf:0.5")
        return cls(Path(path), value)


@dataclass(frozen=True)
class Rope:
    """The rotary positions; the defaults leave everything to the model file.

    Args:
        scaling: None or one of ROPE_SCALINGS
        freq_base: 0 = the model's
        freq_scale: 0 = the model's
        yarn_orig_ctx: tokens of context it was trained for, 0 = the model's
        yarn_ext_factor: negative = the model's, as for the other factors of YaRN
    """

    scaling: str | None = None
    freq_base: float = 0.0
    freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in ROPE_SCALINGS:
            raise OptionError(f"rope scaling {self.scaling}: choose one of {', '.join(ROPE_SCALINGS)}")
        for name in ("freq_base", "freq_scale", "yarn_orig_ctx"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                what = f"rope {name.replace('_', ' ')}"
                raise OptionError(f"{what} is {value}: give a positive number, or 0 for the model's")
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"):
            if not math.isfinite(getattr(self, name)):
                raise OptionError(f"{name.replace('_', ' ')} is {getattr(self, name)}: give a finite number")


@dataclass(frozen=True)
class Override:
    """A key of the model file with another value, as in `--override-kv KEY=TYPE:VALUE`."""

    key: str
    kind: str
    value: int | float | bool | str

    @classmethod
    def parse(cls, text: str) -> Override:
        """Parse KEY=TYPE:VALUE.

        Raises:
            OptionError: the text is not of this form, or llama.cpp cannot hold the value
        """
        key, equals, typed = text.partition("=")
        kind, colon, value = typed.partition(":")
        if not (key and equals and colon) or kind not in OVERRIDE_TYPES:
            raise OptionError(f"override {text!r}: give KEY=TYPE:VALUE, TYPE one of {', '.join(OVERRIDE_TYPES)}")
        if max(len(key.encode()), len(value.encode())) > LONGEST_OVERRIDE or "\0" in text:
            raise OptionError(f"override {key[:40]!r}: key and value hold at most {LONGEST_OVERRIDE} bytes each")
        try:
            return cls(key, kind, _value(kind, value))
        except ValueError:
            raise OptionError(f"override {text!r}: {value!r} is no {kind}") from None


def _value(kind: str, text: str) -> int | float | bool | str:
    """Parse a value. Raises ValueError for what is no `kind`."""
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if kind == "int":
        number = int(text)
        if not -(2**63) <= number < 2**63:
            raise ValueError(text)
        return number
    return float(text) if kind == "float" else text


@dataclass(frozen=True)
class Placement:
    """A buffer, such as CPU or CUDA0, for tensors whose names match a pattern (an ECMAScript regular expression)."""

    pattern: str
    buffer: str

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse PATTERN=BUFFER; the last equals sign separates.

        Raises:
            OptionError: the text is not of this form
        """
        pattern, _, buffer = text.rpartition("=")
        if not pattern or not buffer or "\0" in text:
            raise OptionError(f"tensor override {text!r}: give PATTERN=BUFFER, for example 'ffn_.*_exps=CPU'")
        return cls(pattern, buffer)


@dataclass(frozen=True)
class ModelOptions:
    """The options of loading a model and making its context.

    - Weights: `mmap`, `mlock`, `check_tensors` (reads and checks every tensor), `repack` (weights rearranged for the
      CPU), `override_kv`, `lora` (all applied at once).
    - Devices: `devices` (names of the GPUs to use, `("none",)` for none of them), `split_mode` over several GPUs,
      `tensor_split` (their shares), `main_gpu`, `override_tensor`, `cpu_moe` (experts of all layers stay in main
      memory), `n_cpu_moe` (those of the first N layers), `numa` (once per process).
    - Context: `n_batch` (tokens submitted at once) and `n_ubatch` (computed at once, 0 = the same), `threads_batch`
      (for more than one token, 0 = as for one), `kv_offload`, `rope`. `flash_attention` and `cache_type_k`,
      `cache_type_v`: `auto` and None leave the choice to measuring, anything else fixes it. `rollback`: snapshots of a
      recurrent state for each slot, so many drafted tokens can be taken back without a checkpoint; None: as many as
      fit, MOST_SNAPSHOTS at most.

    Raises:
        OptionError: an option has a value that cannot be
    """

    mmap: bool = True
    mlock: bool = False
    check_tensors: bool = False
    repack: bool = True
    override_kv: tuple[Override, ...] = ()
    lora: tuple[Adapter, ...] = ()
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    override_tensor: tuple[Placement, ...] = ()
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    numa: str | None = None
    n_batch: int = 512
    n_ubatch: int = 0
    threads_batch: int = 0
    flash_attention: str = "auto"
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    kv_offload: bool = True
    rope: Rope = field(default_factory=Rope)
    rollback: int | None = None

    def __post_init__(self) -> None:
        _one_of("flash attention", self.flash_attention, FLASH_ATTENTION)
        _one_of("split mode", self.split_mode, SPLIT_MODES)
        for name, value, choices in (
            ("cache type K", self.cache_type_k, tuple(CACHE_TYPES)),
            ("cache type V", self.cache_type_v, tuple(CACHE_TYPES)),
            ("numa", self.numa, NUMA),
        ):
            if value is not None:
                _one_of(name, value, choices)
        if "none" in self.devices and len(self.devices) > 1:
            raise OptionError(f"devices {','.join(self.devices)}: give names, or none alone")
        for name in ("main_gpu", "n_cpu_moe", "n_ubatch", "threads_batch"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name.replace('_', ' ')} is {getattr(self, name)}: give 0 or more")
        if self.rollback is not None and not 0 <= self.rollback <= LARGEST_ROLLBACK:
            raise OptionError(f"rollback is {self.rollback}: give 0 to {LARGEST_ROLLBACK} snapshots, or auto")
        if self.n_batch < 1:
            raise OptionError(f"a batch of {self.n_batch} tokens: give at least 1")
        if any(not math.isfinite(share) or share < 0 for share in self.tensor_split):
            raise OptionError("tensor split: shares are numbers from 0 on, such as 3,1")
        if self.tensor_split and not sum(self.tensor_split):
            raise OptionError("tensor split: at least one share must be above 0")
        if self.flash_attention == "off" and self.cache_type_v not in (None, *FLOAT_CACHE_TYPES):
            raise OptionError(f"cache type V {self.cache_type_v} needs flash attention; leave `flash_attention` auto")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelOptions:
        """Invert `dataclasses.asdict`, also through JSON.

        Raises:
            TypeError: the shape is another one
            OptionError: an option has a value that cannot be
        """
        nested = {
            "override_kv": tuple(Override(**each) for each in data["override_kv"]),
            "override_tensor": tuple(Placement(**each) for each in data["override_tensor"]),
            "lora": tuple(Adapter(Path(each["path"]), each["scale"]) for each in data["lora"]),
            "devices": tuple(data["devices"]),
            "tensor_split": tuple(data["tensor_split"]),
            "rope": Rope(**data["rope"]),
        }
        return cls(**{**data, **nested})


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{what} {value}: choose one of {', '.join(choices)}")


MAX_SEED = 0xFFFFFFFE  # llama.cpp takes 0xFFFFFFFF for "any seed"
MOST_BREAKERS = 32  # DRY looks for each in the whole vocabulary

# llama.cpp's samplers in its order, each with the values that switch it off.
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
INFILL = "infill"  # llama.cpp offers it as well; it is used only if it is named


@dataclass(frozen=True)
class Sampling:
    """Options of one request. The defaults are those of llama.cpp, except the temperature: 0 is greedy.

    `Engine.sampling` makes one of the options that are named, what the model's file recommends, and llama.cpp's
    defaults, as the commands do.

    Attributes:
        temperature: 0 = the likeliest token; else logits are divided by it
        top_k: keep the k likeliest (0 = all)
        top_p: keep the smallest set of mass top_p
        min_p: drop what has less than min_p of the likeliest's probability
        seed: 0 .. 2^32 - 2; None = a random one, which `Sampler.seed` returns
        repeat_penalty: greater than 0; 1 = off
        repeat_last_n: how many of the newest tokens the penalties count, the prompt's included (0 = off, -1 = all)
        presence_penalty: 0 = off
        frequency_penalty: 0 = off
        typical_p: keep the mass typical_p of tokens whose surprise is nearest to the expected one (1 = off)
        top_n_sigma: keep logits within so many standard deviations of the greatest (0 or less = off)
        xtc_probability: how often the likeliest tokens above the threshold are left out, all but the last (0 = off)
        xtc_threshold: of xtc_probability (more than 0.5 = off)
        dynatemp_range: the temperature varies so much in both directions with the entropy (0 = off)
        dynatemp_exponent: of dynatemp_range
        dry_multiplier: DRY's penalty for going on with a repetition (0 = off)
        dry_base: the penalty grows with this base
        dry_allowed_length: repetitions up to so many tokens are not penalized
        dry_penalty_last_n: how many of the newest tokens DRY searches, the prompt's included (0 = off, -1 = all)
        dry_sequence_breakers: texts that end a repetition
        mirostat: 1 or 2 keep the surprise near mirostat_tau, in place of all samplers but the temperature (0 = off)
        mirostat_tau: surprise to aim at, in bits
        mirostat_eta: learning rate of mirostat
        adaptive_target: draw tokens near this probability (negative = off)
        adaptive_decay: of the memory of adaptive_target, 0 to 0.99
        min_keep: tokens that top-p, min-p, typical and XTC leave at least
        samplers: the order of the samplers, by names of SAMPLERS and INFILL; those that are missing are off
        logit_bias: pairs of token id and bias added to its logit; -inf forbids the token
        grammar: the result of `gbnf`, `lark` or `json_schema`

    The fields of samplers that are off have the value that switches them off.

    Raises:
        OptionError: a value is outside these
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] = tuple(SAMPLERS)
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(low, int) and isinstance(high, int):
                _whole(name, 0 if name == "seed" and value is None else value, low, high)
            else:
                _real(name, value, low, high)
        for name in ("dry_sequence_breakers", "samplers"):
            texts = getattr(self, name)
            if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
                raise OptionError(f"{name} is {texts!r}: give a tuple of texts that are not empty")
        if len(self.dry_sequence_breakers) > MOST_BREAKERS:
            raise OptionError(f"dry_sequence_breakers: give at most {MOST_BREAKERS}")
        if unknown := next((name for name in self.samplers if name not in (*SAMPLERS, INFILL)), None):
            raise OptionError(f"samplers: {unknown!r} is unknown; there are {', '.join((*SAMPLERS, INFILL))}")
        _check_bias(self.logit_bias)
        if not (self.grammar is None or isinstance(self.grammar, Grammar)):
            raise OptionError("grammar: give what gbnf, lark or json_schema of rest_local.grammar returns")
        if self.mirostat:
            object.__setattr__(self, "samplers", tuple({"temperature"}.intersection(self.samplers)))
            object.__setattr__(self, "dynatemp_range", 0.0)
        for name, off in SAMPLERS.items():
            if name not in self.samplers:
                for field_name, value in off.items():
                    object.__setattr__(self, field_name, value)

    @property
    def penalizes(self) -> bool:
        """Return True if the text so far changes the logits: a penalty or DRY is on."""
        active = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return (active and self.repeat_last_n != 0) or self.dry_multiplier != 0.0

    @property
    def picks_likeliest(self) -> bool:
        """Return True if nothing is drawn or left out: the likeliest token after biases and penalties wins."""
        leaves_out = self.typical_p < 1 or (self.xtc_probability > 0 and self.xtc_threshold <= 0.5)
        return self.temperature == 0 and self.dynatemp_range == 0 and not leaves_out

    @property
    def is_greedy(self) -> bool:
        """Return True if nothing shapes the logits, and the answer is their arg-max."""
        return self.picks_likeliest and not self.penalizes and not self.logit_bias and self.grammar is None


# The least and the greatest value of each number. They are whole for whole numbers.
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6), "top_k": (0, 2**31 - 1), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "seed": (0, MAX_SEED),
    "repeat_penalty": (1e-6, 1e6), "repeat_last_n": (-1, 2**20), "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6), "typical_p": (0.0, 1.0), "top_n_sigma": (-1e6, 1e6),
    "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0), "dynatemp_range": (0.0, 1e6),
    "dynatemp_exponent": (0.0, 1e6), "dry_multiplier": (0.0, 1e6), "dry_base": (1.0, 1e6),
    "dry_allowed_length": (0, 2**31 - 1), "dry_penalty_last_n": (-1, 2**20), "mirostat": (0, 2),
    "mirostat_tau": (0.0, 1e6), "mirostat_eta": (0.0, 1e6), "adaptive_target": (-1e6, 1.0),
    "adaptive_decay": (0.0, 0.99), "min_keep": (0, 2**20),
}  # fmt: skip
NUMBERS = tuple(_RANGES)  # the numeric fields of `Sampling`


def _real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{name} is {value!r}: give a number from {low:g} to {high:g}")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {value!r}: give a whole number from {low} to {high}")


def _check_bias(pairs: Any) -> None:
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise OptionError("logit_bias: give pairs of token id and bias")
    for token, bias in pairs:
        _whole("logit_bias token", token, 0, 2**31 - 1)
        if bias != -math.inf:
            _real("logit_bias of a token", bias, -1e6, 1e6)
