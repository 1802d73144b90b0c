"""Recorded answers of real models, which drive a replay.

- A file goes in, (prompt, answer) token ids come out.
- The fields of a line tell its format: MT-Bench answers (with their questions in the same folder), AlpacaEval outputs,
  HumanEval problems, or OpenAI batch lines with request and response.
- Any other line raises InputInvalid with file, line and cause.

The module knows nothing about drafting.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rest_local.errors import InputInvalid
from rest_local.llama.vocabulary import Vocabulary

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
MAX_TEXT = 256 * 2**20  # characters of one unpacked file: a replay holds all of its tokens, at 36 bytes each


@dataclass(frozen=True)
class Recorded:
    """One answer: token ids of its prompt, of the answer, and of the prediction that the client sends. `category`: what
    the file says about the kind of the prompt, "" if it says nothing.
    """

    name: str
    prompt: list[int]
    answer: list[int]
    prediction: Sequence[int] = ()
    category: str = ""


def load(path: Path, vocabulary: Vocabulary) -> list[Recorded]:
    """Every answer of a file, in order. Raises InputInvalid for a wrong line or a file without answers, and OSError."""
    found = []
    for number, line in _lines(path):
        try:
            texts = list(_texts(line, path, number))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputInvalid("file", path, f"line {number} lacks a field of its format ({error!r})") from error
        for name, category, prompt, answer in texts:
            if not isinstance(prompt, str) or not isinstance(answer, str):
                raise InputInvalid("file", path, f"line {number} holds a prompt or an answer that is not text")
            ids = [vocabulary.tokenize(text, special=False).tolist() for text in (prompt, answer)]
            found.append(Recorded(str(name), ids[0], ids[1], category=str(category)))
    if not found:
        raise InputInvalid("file", path, "holds no recorded answer")
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the file with their line numbers from 1. One line is in memory at a time."""
    open_text = gzip.open if path.suffix == ".gz" else open
    read, number = 0, 0
    try:
        with open_text(path, "rt", encoding="utf-8") as file:
            while text := file.readline(MAX_TEXT):
                number, read = number + 1, read + len(text)
                if read >= MAX_TEXT:
                    raise InputInvalid("file", path, f"more than {MAX_TEXT >> 20} M characters; split the file")
                if not text.strip():
                    continue
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise InputInvalid("file", path, f"line {number} is not an object")
                yield number, line
    except UnicodeDecodeError as error:
        raise InputInvalid("file", path, f"not UTF-8 text after line {number}") from error
    except (ValueError, RecursionError) as error:
        raise InputInvalid("file", path, f"line {number} is not JSON ({error})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputInvalid("file", path, f"not a whole gzip file ({error})") from error


def _texts(line: Mapping[str, Any], path: Path, number: int) -> Iterator[tuple[str, str, str, str]]:
    """Name, category, prompt and answer."""
    if "choices" in line and "question_id" in line:
        yield from _mt_bench(line, path)
    elif "instruction" in line and "output" in line:
        yield str(number), line.get("dataset", ""), f"{line['instruction']}\n", line["output"]
    elif "canonical_solution" in line:
        yield line.get("task_id", str(number)), "", line["prompt"], line["canonical_solution"]
    elif "body" in line and "response" in line:
        yield _batch(line, number)
    else:
        fields = ", ".join(map(str, line))
        raise InputInvalid("file", path, f"line {number} holds no recorded answer (fields {fields[:80]})")


def _mt_bench(line: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str, str, str]]:
    """The turns in Vicuna's conversation template, because the shipped answers are Vicuna's."""
    category, turns = _questions(path.parent / "mt_bench_questions.jsonl")[line["question_id"]]
    text = VICUNA
    for turn, (question, answer) in enumerate(zip(turns, line["choices"][0]["turns"], strict=True), 1):
        text += f" USER: {question} ASSISTANT:"
        yield f"{line['question_id']}.{turn}", category, text, f" {answer}"
        text += f" {answer}</s>"


def _questions(path: Path) -> dict[int, tuple[str, Sequence[str]]]:
    """By number: the category and the turns."""
    return {line["question_id"]: (line.get("category", ""), line["turns"]) for _, line in _lines(path)}


def _batch(line: Mapping[str, Any], number: int) -> tuple[str, str, str, str]:
    """A request and its response. Roles become words, because the model's chat template is unknown here."""
    body, answer = line["body"], line["response"]["body"]["choices"][0]
    if "messages" in body:
        parts = [f"{message['role']}: {_plain(message['content'])}\n" for message in body["messages"]]
        return line.get("custom_id", str(number)), "", "".join(parts), _plain(answer["message"]["content"])
    return line.get("custom_id", str(number)), "", body["prompt"], answer["text"]


def _plain(content: Any) -> str:
    """The text of a message: a string, or its text parts. A refusal or a tool call has none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""
