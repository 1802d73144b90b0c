"""A small data folder for experiments, with the vocabulary of a tiny model, and a small folder of text."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

from rest_local.bench.experiments.inputs import ANSWERS

SENTENCE = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"


def make_data(folder: Path, vocabulary: Path) -> Path:
    """Six answers of each set, all of them beginning with SENTENCE, and the vocabulary of `vocabulary`."""
    folder.mkdir()
    for chosen in ANSWERS.values():
        shutil.copy(vocabulary, folder / chosen.vocabulary)
    texts = [f"{SENTENCE}# answer {number}\n" for number in range(6)]
    problems = [
        {"task_id": f"T/{n}", "prompt": f"# task {n}\n", "canonical_solution": text} for n, text in enumerate(texts)
    ]
    (folder / ANSWERS["HumanEval"].file).write_bytes(gzip.compress(_lines(problems)))
    outputs = [{"instruction": f"question {n}", "output": text} for n, text in enumerate(texts)]
    (folder / ANSWERS["AlpacaEval"].file).write_bytes(_lines(outputs))
    questions = [{"question_id": n, "category": "coding", "turns": [f"one {n}", f"two {n}"]} for n in range(3)]
    (folder / "mt_bench_questions.jsonl").write_bytes(_lines(questions))
    answers = [{"question_id": n, "choices": [{"turns": texts[2 * n : 2 * n + 2]}]} for n in range(3)]
    (folder / ANSWERS["MT-Bench"].file).write_bytes(_lines(answers))
    people = [{"question_id": n, "category": "qa", "turns": [f"{'who and what, ' * 40}{n}"]} for n in range(4)]
    (folder / "spec_bench_questions.jsonl").write_bytes(_lines([*questions, *people]))
    return folder


def make_text(folder: Path) -> Path:
    """Three files, the first of them with SENTENCE."""
    folder.mkdir()
    for number, text in enumerate((SENTENCE, "class Empty:\n    pass\n\n\n", "import os\n\nprint(os.name)\n\n\n")):
        (folder / f"module{number}.py").write_text(text * 3)
    return folder


def _lines(rows: list[dict[str, object]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()
