"""Tasks that are questions: chat, JSON answers, Spec-Bench by category, MT-Bench."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rest_local.bench.comparing.prompting import Prompting, spread
from rest_local.bench.comparing.sides import Task
from rest_local.errors import InputInvalid

CHAT = (
    ("lists-and-tuples", "What is the difference between a list and a tuple in Python? Give an example of each."),
    ("binary-search", "Write a Python function that searches a sorted list by bisection, and explain each line."),
    ("move", "I move to another city next month. Make a list of what I should do in each week before."),
    ("letter", "Write a polite letter to my landlord: the heating has not worked for three days."),
    ("explain-twice", "Explain how a hash table works, then repeat the explanation in simpler words."),
    ("table", "Make a table of the planets with diameter, moons and length of a day."),
)
TEXT = {"type": "string", "maxLength": 40}
JSON: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "person",
        "Describe the author of a Python library as a JSON object.",
        {
            "type": "object",
            "properties": {
                "name": TEXT,
                "age": {"type": "integer", "minimum": 18, "maximum": 99},
                "languages": {"type": "array", "items": {"enum": ["Python", "C", "Rust", "Go"]}, "maxItems": 4},
                "maintains_a_library": {"type": "boolean"},
            },
            "required": ["name", "age", "languages", "maintains_a_library"],
            "additionalProperties": False,
        },
    ),
    (
        "files",
        "List four files of a small Python project as JSON, with path, lines and purpose.",
        {
            "type": "array",
            "minItems": 4,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "path": TEXT,
                    "number_of_lines": {"type": "integer", "minimum": 1, "maximum": 2000},
                    "purpose": {"enum": ["library", "test", "documentation", "configuration"]},
                },
                "required": ["path", "number_of_lines", "purpose"],
                "additionalProperties": False,
            },
        },
    ),
    (
        "call",
        "Book a table for two tomorrow at seven: answer with the call as JSON.",
        {
            "type": "object",
            "properties": {
                "function": {"const": "book_a_table_in_a_restaurant"},
                "arguments": {
                    "type": "object",
                    "properties": {"number_of_people": {"type": "integer", "maximum": 20}, "time_of_day": TEXT},
                    "required": ["number_of_people", "time_of_day"],
                    "additionalProperties": False,
                },
            },
            "required": ["function", "arguments"],
            "additionalProperties": False,
        },
    ),
)


def chat(prompting: Prompting, n: int, tokens: int) -> Iterator[Task]:
    for name, question in spread(CHAT, n):
        yield Task(name, "chat", prompting.question(question), tokens)


def json_answers(prompting: Prompting, n: int, tokens: int) -> Iterator[Task]:
    for name, question, schema in spread(JSON, n):
        yield Task(name, "json", prompting.question(question), tokens, schema=schema)


def spec_bench(prompting: Prompting, path: Path, n: int, tokens: int) -> Iterator[Task]:
    """`n` questions of each category, in the order of the file. Raises InputInvalid, OSError."""
    by_category: dict[str, list[tuple[str, str]]] = {}
    for category, name, question in _questions(path):
        by_category.setdefault(category, []).append((name, question))
    for category, questions in by_category.items():
        for name, question in spread(questions, n):
            yield Task(name, f"spec-bench/{category}", prompting.question(question), tokens)


def mt_bench(prompting: Prompting, path: Path, n: int, tokens: int) -> Iterator[Task]:
    """The first turns of `n` questions. Raises InputInvalid, OSError."""
    for _, name, question in spread(_questions(path), n):
        yield Task(name, "mt-bench", prompting.question(question), tokens)


def _questions(path: Path) -> list[tuple[str, str, str]]:
    """(category, id, first turn) of each line."""
    found = []
    try:
        for line in path.read_text("utf-8").splitlines():
            if line.strip():
                question = json.loads(line)
                found.append((str(question["category"]), str(question["question_id"]), str(question["turns"][0])))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InputInvalid("file", path, f"does not hold questions of Spec-Bench or MT-Bench ({error!r})") from error
    if not found:
        raise InputInvalid("file", path, "holds no question")
    return found
