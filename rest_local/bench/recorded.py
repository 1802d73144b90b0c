"""Recorded answers of real models: what replay drives the decoder with.

Contract: a file goes in, (prompt, answer) token ids come out. Formats are told by their fields: MT-Bench answers
(their questions lie beside them), AlpacaEval outputs, HumanEval problems, and OpenAI batch lines that hold request and
response. Knows nothing about drafting.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.vocabulary import Vocabulary

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Recorded:
    """One answer: token ids of what stood before it, and its own."""

    name: str
    prompt: list[int]
    answer: list[int]


def load(path: Path, vocabulary: Vocabulary) -> list[Recorded]:
    """Every answer of a file, in its order. Raises OptionError where a line is of no known kind, OSError."""
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        for name, prompt, answer in _texts(line, path, number):
            ids = [vocabulary.tokenize(text, special=False).tolist() for text in (prompt, answer)]
            found.append(Recorded(name, ids[0], ids[1]))
    return found


def _texts(line: Any, path: Path, number: int) -> Iterator[tuple[str, str, str]]:
    if not isinstance(line, dict):
        raise OptionError(f"{path}: line {number} is not an object")
    if "choices" in line and "question_id" in line:
        yield from _mt_bench(line, path)
    elif "instruction" in line and "output" in line:
        yield str(number), f"{line['instruction']}\n", line["output"]
    elif "canonical_solution" in line:
        yield line.get("task_id", str(number)), line["prompt"], line["canonical_solution"]
    elif "body" in line and "response" in line:
        yield _batch(line, number)
    else:
        raise OptionError(f"{path}: line {number} holds no recorded answer (fields {', '.join(map(str, line))})")


def _mt_bench(line: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str, str]]:
    """Vicuna's conversation template: the answers at hand are Vicuna's."""
    turns = _questions(path.parent / "mt_bench_questions.jsonl")[line["question_id"]]
    text = VICUNA
    for turn, (question, answer) in enumerate(zip(turns, line["choices"][0]["turns"], strict=True), 1):
        text += f" USER: {question} ASSISTANT:"
        yield f"{line['question_id']}.{turn}", text, f" {answer}"
        text += f" {answer}</s>"


def _questions(path: Path) -> dict[int, Sequence[str]]:
    with path.open(encoding="utf-8") as file:
        return {line["question_id"]: line["turns"] for line in map(json.loads, file)}


def _batch(line: Mapping[str, Any], number: int) -> tuple[str, str, str]:
    body, answer = line["body"], line["response"]["body"]["choices"][0]
    if "messages" in body:
        parts = [f"{message['role']}: {message['content']}\n" for message in body["messages"]]
        return line.get("custom_id", str(number)), "".join(parts), answer["message"]["content"]
    return line.get("custom_id", str(number)), body["prompt"], answer["text"]
