"""Prompts of the workloads as token ids of one model. Loads the vocabulary and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rest_local.decoding.streaming import Chat
from rest_local.llama.model import Model

T = TypeVar("T")


class Prompting:
    """Close it, or use `with`. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.model = Model.open(path, vocab_only=True)
        self.vocabulary = self.model.vocabulary

    def text(self, text: str) -> list[int]:
        """A text to go on with, with the model's start token."""
        tokens: list[int] = self.vocabulary.tokenize(text, special=True, add_special=True).tolist()
        doubled = len(tokens) > 1 and tokens[0] == tokens[1] == self.vocabulary.bos
        return tokens[1:] if doubled else tokens

    def question(self, question: str, beginning: str = "") -> list[int]:
        """A question in the model's chat template, and the `beginning` of its answer. Raises TemplateFailed."""
        if not self.model.chat_template:
            return self.text(f"Question: {question}\n\nAnswer: {beginning}")
        return self.text(Chat(self.model, [{"role": "user", "content": question}]).prompt + beginning)

    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(int(token) for token in self.vocabulary.ends)

    def close(self) -> None:
        self.model.close()

    def __enter__(self) -> Prompting:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spread(items: Sequence[T], n: int) -> list[T]:
    """`n` of the items at equal distances, in their order; all if there are fewer."""
    return [items[at * len(items) // n] for at in range(min(n, len(items)))] if len(items) > n else list(items)
