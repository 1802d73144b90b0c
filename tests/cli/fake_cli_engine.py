"""A fake engine for the commands: scripted pieces instead of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rest_local.cli.options import EngineChoice
from rest_local.llama.options import ModelOptions


@dataclass
class FakePiece:
    text: str
    tokens: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass
class FakeResult:
    text: str
    tokens: list[int]
    finish_reason: str
    draft: dict[str, Any]
    timings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens": len(self.tokens)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


class FakeStream:
    """Yields the script; an exception in it is raised, and a function called, where it stands."""

    def __init__(self, script: Sequence[FakePiece | BaseException | Callable[[], None]], speed: float) -> None:
        self._script, self._speed = script, speed
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

    @property
    def result(self) -> FakeResult:
        tokens = [token for piece in self._said for token in piece.tokens]
        sources = [source for piece in self._said for source in piece.sources if source != "target"]
        steps = len(self._said)
        return FakeResult(
            text="".join(piece.text for piece in self._said),
            tokens=tokens,
            finish_reason="cancelled" if self._cancelled else "stop",
            draft={
                "steps": steps,
                "drafted": 2 * len(sources),
                "accepted": len(sources),
                "mat": len(tokens) / max(steps, 1),
                "by_source": {s: {"drafted": 2, "accepted": sources.count(s)} for s in dict.fromkeys(sources)},
            },
            timings={"predicted_n": len(tokens), "predicted_ms": 10.0, "predicted_per_second": self._speed},
        )


@dataclass
class FakeEngine:
    """Answers each `generate` with the next script of `scripts`, the last one for ever."""

    scripts: list[list[FakePiece | BaseException | Callable[[], None]]]
    warnings: list[str] = field(default_factory=list)
    choice: EngineChoice = field(default_factory=EngineChoice)
    prompts: list[Any] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    speeds: dict[str | None, float] = field(default_factory=lambda: {"off": 100.0, None: 150.0})
    model: Any = field(
        default_factory=lambda: SimpleNamespace(
            path="model.gguf",
            name="fake",
            description="fake 1M Q8_0",
            n_params=1_000_000,
            size_bytes=1_100_000,
            n_ctx_train=1024,
            n_vocab=4096,
            chat_template=None,
            options=ModelOptions(),
            vocabulary=SimpleNamespace(piece=lambda token: bytes([token % 128])),
        )
    )
    capability: Any = field(default_factory=lambda: SimpleNamespace(kind="tree", reason="attention only"))
    settings: dict[str, Any] = field(default_factory=lambda: {"flash_attention": False, "exact": False})
    self_test: dict[str, Any] | None = field(default_factory=lambda: {"rows": 492, "flips": 0})
    cost_curve: Any = field(
        default_factory=lambda: SimpleNamespace(
            table=lambda: [
                {"n_ctx": 512, "n": 1, "ratio": 1.0, "ms": 2.5},
                {"n_ctx": 512, "n": 8, "ratio": 3.25, "ms": 8.125},
            ]
        )
    )

    calibration: dict[str, Any] = field(
        default_factory=lambda: {
            "state": "provisional", "age_s": 7300.0, "noise": 0.031, "uncertainty": {"2": 0.05, "16": 0.4},
            "estimated_from": "m2ultra-7b-q8_0", "seconds": 0.1,
        }
    )  # fmt: skip
    measured: Any = None  # of `tune`
    compared: int = 0

    def compare(self) -> None:
        self.compared += 1

    def tune(self, report: Callable[[int, int], None] | None = None) -> Any:
        if report:
            report(1, 2)
            report(2, 2)
        if isinstance(self.measured, BaseException):
            raise self.measured
        return self.measured

    def generate(self, prompt: Any, **arguments: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.arguments.append(arguments)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script and isinstance(script[0], BaseException):  # while the prompt is evaluated
            raise script[0]
        return FakeStream(script, self.speeds[arguments.get("policy")])

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
