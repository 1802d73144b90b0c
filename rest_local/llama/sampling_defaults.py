"""Fill in sampling options that a request leaves open: the model file's recommendations, else llama.cpp's defaults.

Model makers store recommendations in the file (`general.sampling.*`), and llama.cpp reads them. `recommended` reads the
same keys, more strictly: a value that is no number or out of range is left out with a warning. `SamplingDefaults`
decides field by field, and says where each value comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.options import INFILL, NUMBERS, SAMPLERS, Sampling

# llama.cpp's defaults.
DEFAULTS = {each.name: getattr(Sampling(), each.name) for each in fields(Sampling)} | {"temperature": 0.8}

_PREFIX = "general.sampling."
# Name of a key after the prefix -> field of `Sampling`.
_FIELDS = {
    "temp": "temperature",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
RECOMMENDED = frozenset(_FIELDS.values())
_SEQUENCE = "sequence"
_ALSO = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typical_p": "typ_p"}
_CHARACTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": INFILL, "a": "adaptive_p",
}  # fmt: skip
_DRAWS = "adaptive_p"  # it draws, so it is always the last, and `adaptive_target` switches it on


def sampler_order(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the value of `Sampling.samplers` for names as llama.cpp reads them, or for its letters in one text
    (`edkypmxt`). Raises OptionError for an unknown one.
    """
    known = {name.replace("_", joint): name for name in (*SAMPLERS, INFILL, _DRAWS) for joint in ("_", "-", "")} | _ALSO
    if isinstance(names, str):
        known, names = _CHARACTERS, list(names)
    found = []
    for name in names:
        if (sampler := known.get(name.strip().lower())) is None:
            raise OptionError(f"samplers: {name[:40]!r} is unknown; there are {', '.join((*SAMPLERS, INFILL))}")
        found.append(sampler)
    return tuple(name for name in dict.fromkeys(found) if name != _DRAWS)


def recommended(metadata: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `Sampling` that a model's file recommends, and a warning for each value left out."""
    found: dict[str, Any] = {}
    warnings = []
    for key, text in metadata.items():
        name = key.removeprefix(_PREFIX)
        if name == key or name not in (*_FIELDS, _SEQUENCE):
            continue
        try:
            if name == _SEQUENCE:
                given: dict[str, Any] = {"samplers": sampler_order(filter(None, text.split(";")))}
            else:
                given = {_FIELDS[name]: _number(_FIELDS[name], text)}
            Sampling(**given)
            found |= given
        except (OptionError, ValueError) as error:
            why = str(error) if isinstance(error, OptionError) else "no number"
            warnings.append(f"the model's file recommends {key} = {text[:40]!r}, which is left out: {why}")
    return found, warnings


def _number(name: str, text: str) -> int | float:
    """Parse a number as llama.cpp writes it: a whole one may be a float in the file. Raises ValueError."""
    value = float(text)
    if not isinstance(DEFAULTS[name], int) or not value.is_integer():
        return value
    return max(int(value), 0) if name == "top_k" else int(value)  # llama.cpp: 0 or less is all


@dataclass(frozen=True)
class SamplingDefaults:
    """The options of requests that do not name all. A call makes the `Sampling` of a request that names some."""

    configured: Mapping[str, Any] = field(default_factory=dict)  # set by the user of the program, for all requests
    recommended: Mapping[str, Any] = field(default_factory=dict)  # recommended by the model's file

    def __call__(self, **named: Any) -> Sampling:
        """Return the sampling of a request that names these fields. Raises OptionError for a value out of range."""
        return Sampling(**{name: value for name, (value, _) in self._resolve(named).items()})

    def origins(self, **named: Any) -> dict[str, tuple[Any, str]]:
        """Return each number of the `Sampling` of such a request, and where it comes from: `set` (named), `option`
        (configured), `model file` or `default`.
        """
        found, effective = self._resolve(named), self(**named)
        return {name: (getattr(effective, name), found[name][1]) for name in NUMBERS}

    def _resolve(self, named: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return the value of each field and its origin, the strongest first. `samplers` or mirostat switch no sampler
        off if something stronger names one of its fields.
        """
        found: dict[str, tuple[Any, str]] = {}
        layers = (named, "set"), (self.configured, "option"), (self.recommended, "model file"), (DEFAULTS, "default")
        for layer, origin in layers:
            wanted = {name for name, off in SAMPLERS.items() if off.keys() & found.keys()}
            for name, value in layer.items():
                fights = (name == "samplers" and wanted - set(value)) or (
                    name == "mirostat" and value and wanted - {"temperature"}
                )
                if name not in found and not fights:
                    found[name] = value, origin
        return found


def checked(options: Mapping[str, Any]) -> None:
    """Raise OptionError for an unknown field of `Sampling`, and for a value out of range."""
    if unknown := next((name for name in options if name not in DEFAULTS), None):
        raise OptionError(f"sampling: {unknown} is no option; there are {', '.join((*NUMBERS, 'samplers'))}")
    Sampling(**options)
