"""A fake engine for the commands: scripted pieces instead of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rest_local.calibration.cost import ESTIMATED, CostCurve
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.following import OpenDatastores
from rest_local.decoding.results import DraftStatistics, SourceCounts, Timings
from rest_local.decoding.stream import Result
from rest_local.llama.options import ModelOptions
from rest_local.llama.sampling_defaults import SamplingDefaults


@dataclass
class FakePiece:
    text: str
    tokens: tuple[int, ...]
    sources: tuple[str, ...]


class FakeStream:
    """A stream of the script. It raises an exception in the script, and calls a function."""

    def __init__(
        self, script: Sequence[FakePiece | BaseException | Callable[[], None]], speed: float, most: int | None = None
    ) -> None:
        self._script, self._speed, self._most = script, speed, most
        self._said: list[FakePiece] = []
        self._cancelled = False

    def __iter__(self) -> Iterator[FakePiece]:
        for item in self._script:
            if isinstance(item, BaseException):
                raise item
            if callable(item):
                item()
                continue
            self._said.append(item)
            yield item

    def cancel(self) -> None:
        self._cancelled = True

    def parser(self) -> Any:
        from rest_local.chat.tools import AnswerFormat

        return AnswerFormat.of("<think>").parser([], "")

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer, which has reasoning if `<think>` begins it."""
        from rest_local.chat.tools import message_of

        parser = self.parser()
        return message_of([*parser.feed(self.result.text), *parser.finish()])

    @property
    def result(self) -> Result:
        tokens = [token for piece in self._said for token in piece.tokens]
        sources = [source for piece in self._said for source in piece.sources if source != "target"]
        steps = len(self._said)
        return Result(
            text="".join(piece.text for piece in self._said),
            tokens=tokens,
            sources=[source for piece in self._said for source in piece.sources],
            finish_reason="cancelled" if self._cancelled else "length" if self._most == len(tokens) else "stop",
            draft=DraftStatistics(
                steps=steps,
                generated=len(tokens),
                plain_step_ms=4.0,  # the streams take 2 ms a token
                drafted=2 * len(sources),
                accepted=len(sources),
                by_source={s: SourceCounts(2, sources.count(s)) for s in dict.fromkeys(sources)},
            ),
            timings=Timings(predicted_tokens=len(tokens), predicted_ms=1e3 * len(tokens) / self._speed),
        )


@dataclass
class FakeEngine:
    """An engine that answers each `generate` and `chat` with the next script of `scripts`, the last one for ever."""

    scripts: list[list[FakePiece | BaseException | Callable[[], None]]]
    warnings: list[str] = field(default_factory=list)
    config: EngineConfig = field(default_factory=EngineConfig)
    prompts: list[Any] = field(default_factory=list)
    messages: list[list[dict[str, str]]] = field(default_factory=list)
    datastores: OpenDatastores = field(default_factory=OpenDatastores)
    projector: Any = None
    n_ctx: int = 1024
    arguments: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    speeds: dict[str | None, float] = field(default_factory=lambda: {"off": 100.0, None: 150.0})
    model: Any = field(
        default_factory=lambda: SimpleNamespace(
            path=Path("model.gguf"), name="fake", description="fake 1M Q8_0", n_params=1_000_000, size_bytes=1_100_000,
            n_ctx_train=1024, n_vocab=4096, chat_template=None, template_variables={}, options=ModelOptions(),
            vocabulary=SimpleNamespace(piece=lambda token: bytes([token % 128])),
        )
    )  # fmt: skip
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    capability: Any = field(default_factory=lambda: SimpleNamespace(kind="tree", reason="attention only"))
    settings: dict[str, Any] = field(default_factory=lambda: {"flash_attention": False, "exact": False})
    self_test: dict[str, Any] | None = field(default_factory=lambda: {"rows": 492, "flips": 0})
    cost_curve: CostCurve = field(
        default_factory=lambda: CostCurve.from_points([512], [1, 8, 64], [[2.5, 8.125, 40.0]], ESTIMATED)
    )

    calibration: dict[str, Any] = field(
        default_factory=lambda: {
            "state": "provisional", "age_s": 7300.0, "noise": 0.031, "uncertainty": {"2": 0.05, "16": 0.4},
            "estimated_from": "m2ultra-7b-q8_0", "seconds": 0.1,
        }
    )  # fmt: skip

    def compare(self, seconds: float = math.inf) -> None:
        pass

    def generate(self, prompt: Any, **arguments: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.arguments.append(arguments)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script and isinstance(script[0], BaseException):  # while the prompt is evaluated
            raise script[0]
        speed = self.speeds[arguments["policy"]] if "policy" in arguments else 500.0
        return FakeStream(script, speed, arguments.get("max_tokens"))

    def chat(self, messages: Sequence[dict[str, str]], **arguments: Any) -> FakeStream:
        self.messages.append([dict(message) for message in messages])
        return self.generate(self.chat_prompt(messages), **arguments)

    @property
    def decoder(self) -> Any:
        tuning = SimpleNamespace(curve=self.cost_curve, self_test=self.self_test, state=lambda: self.calibration)
        context = SimpleNamespace(capability=self.capability, compare=self.compare, tuning=tuning)
        return SimpleNamespace(context=context, generates=True)

    def statistics(self) -> dict[str, Any]:
        return {"cells_used": 12}

    def close(self) -> None:
        self.closed = True

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


HELLO: list[FakePiece | BaseException | Callable[[], None]] = [
    FakePiece("Hel", (72, 101, 108), ("datastore", "datastore", "target")),
    FakePiece("lo", (108, 111), ("context", "target")),
]


Install = Callable[..., FakeEngine]  # the fixture `fake_engine`
Call = Callable[..., Any]  # the fixture `call`
