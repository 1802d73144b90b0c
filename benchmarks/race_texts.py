"""The texts of the race, by workload: recorded answers with their prompts, and what was written before them.

- `whole-file edits`: of a repository's history; the old file is in the prompt and is sent as prediction too
- `edits by agents`: the same kind of change as search and replace and as patches (`benchmarks.transcripts`)
- `steps of an agent`: recorded steps of a real one; other runs of it are the history
- `chat`: recorded answers of a real model; its other answers are the history
- `code`: HumanEval; the standard library is the datastore
- `second request`: a file is written, then written again with a change; the old file is not in the second prompt, but
  every server has answered the first request
- `JSON`: records are copied from a table into JSON; answers of the same form are the history

A prompt that is too long loses its beginning, as clients cut conversations, and a long answer its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

from benchmarks.transcripts import FORMATS, Change, changes_of, transcripts
from rest_local.bench.workload import Recorded, load, whole_file_edit
from rest_local.llama.vocabulary import Vocabulary

FILES = {
    "steps of an agent": "agents_mini_swe_gemini3.jsonl.gz",
    "chat": "alpaca_eval_outputs_llama-3-8b-instruct.jsonl",
    "code": "HumanEval.jsonl.gz",
}
EDITS_READ, BEFORE = 300, 6  # edits of a repository; lines before the first changed one
FORMS = ("aider, search/replace", "Cline, replace_in_file", "Claude Code, Edit", "Codex, apply_patch")


@dataclass(frozen=True)
class Task:
    """One answer of the race. `before`: a request that every server answers first. `prediction`: a text."""

    workload: str
    name: str
    prompt: list[int]
    answer: list[int]
    prediction: str = ""
    before: tuple[list[int], list[int]] | None = None

    @property
    def id(self) -> str:
        return f"{self.workload}: {self.name}"


@dataclass(frozen=True)
class Texts:
    """Where the texts come from and how much of them is taken: `prompt` and `answer` in tokens at most."""

    vocabulary: Vocabulary
    repository: Path
    data: Path | None
    prompt: int
    answer: int

    def tasks(self, workload: str, count: int) -> list[Task]:
        """A regular sample, of `count` at most, of the answers that are at least half as long as they may be. Raises
        FileNotFoundError where the recorded answers are not there, and ValueError where none is long enough.
        """
        found = [
            replace(each, workload=workload, prompt=each.prompt[-self.prompt :], answer=each.answer[: self.answer])
            for each in WORKLOADS[workload](self)
            if len(each.answer) >= self.answer // 2
        ]
        if not found:
            raise ValueError(f"no answer has {self.answer // 2} tokens or more")
        count = min(count, len(found))
        return [found[i * len(found) // count] for i in range(count)]

    def history(self, workload: str) -> list[list[int]]:
        """Earlier answers of the same kind; none of them is the answer of a task."""
        if workload == "JSON":
            return [task.answer for task in _json(self, later=True)]
        if workload not in ("steps of an agent", "chat"):
            return []
        return [each.answer for each in self._parted(workload)[1]]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.vocabulary.tokenize(text, special=False).tolist()
        return found

    def _parted(self, workload: str) -> tuple[list[Recorded], list[Recorded]]:
        """The answers to test and the earlier ones: a quarter of the runs or answers, and the others."""
        if self.data is None or not (path := self.data / FILES[workload]).is_file():
            raise FileNotFoundError(f"{FILES[workload]} is not there; give --data FOLDER")
        answers = load(path, self.vocabulary)
        of = [each.name.rpartition("-")[0] if workload == "steps of an agent" else each.name for each in answers]
        tested = set(list(dict.fromkeys(of))[::4])
        both = list(zip(answers, of, strict=True))
        return [each for each, run in both if run in tested], [each for each, run in both if run not in tested]


def _whole_files(texts: Texts) -> Iterator[Task]:
    for change in _changes(texts, 3):
        each = whole_file_edit(change.path, change.message, change.old, change.new, texts.vocabulary)
        old = b"".join(map(texts.vocabulary.piece, each.prediction)).decode("utf-8", "replace")
        yield Task("", change.path, each.prompt, each.answer, old)


def _changes(texts: Texts, characters: int) -> Iterator[Change]:
    """Changes of a repository's files, of which a part around the first changed line is taken: for each token of a
    prompt as many characters, where the changes allow that.
    """
    for each in changes_of(texts.repository, 0, EDITS_READ):
        a, b = (text.splitlines(keepends=True) for text in (each.old, each.new))
        blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        same = [(i + k, j + k) for i, j, n in blocks for k in range(n)]
        first = next((k for k, pair in enumerate(same) if pair != (k, k)), len(same))
        old = new = ""
        for i, j in same[first:]:
            at = max(0, first - BEFORE)
            if len("".join(a[at:i])) > characters * texts.prompt:
                break
            old, new = "".join(a[at:i]), "".join(b[at:j])
        if len(old) > characters * texts.prompt // 2 and old != new:
            yield Change(each.path, each.message.partition("\n")[0], old, new)


def _agents_edits(texts: Texts) -> Iterator[Task]:
    forms, changes = [form for form in FORMATS if form.name in FORMS], list(_changes(texts, 1))
    of_form = [list(transcripts(changes, form, texts.vocabulary)) for form in forms]
    for number, same in enumerate(zip(*of_form, strict=True)):
        each, form = same[number % len(forms)], forms[number % len(forms)]
        yield Task("", f"{each.name}, {form.name}", each.prompt, each.answer)


def _recorded(workload: str) -> Callable[[Texts], Iterator[Task]]:
    def tasks(texts: Texts) -> Iterator[Task]:
        for each in texts._parted(workload)[0]:
            yield Task("", each.name, each.prompt, each.answer)

    return tasks


def _second_requests(texts: Texts) -> Iterator[Task]:
    for change, other in pairwise(_changes(texts, 1)):
        first = texts.ids(f"Write {change.path}.\n\n"), texts.ids(change.old)[: texts.answer]
        read = f"This is {other.path}:\n\n{other.old}\n\n"
        prompt = texts.ids(f"{read}Write {change.path} again, with this change:\n{change.message}\n\n")
        new = texts.ids(change.new)
        if len(first[0]) + len(first[1]) <= len(prompt) <= texts.prompt and new[: texts.answer] != first[1]:
            yield Task("", change.path, prompt, new, before=first)


def _json(texts: Texts, later: bool = False) -> Iterator[Task]:
    statuses, size = list(HTTPStatus), 6
    groups = [statuses[i : i + size] for i in range(0, len(statuses) - size + 1, 3)]
    for group in groups[len(groups) // 2 + 1 :] if later else groups[: len(groups) // 2 - 1]:
        table = "".join(f"{each.value} | {each.phrase} | {each.description or '-'}\n" for each in group)
        rows = [{"code": each.value, "phrase": each.phrase, "description": each.description} for each in group]
        asked = f"Write these status codes as JSON with code, phrase and description.\n\n{table}\n"
        yield Task("", f"{group[0].value}", texts.ids(asked), texts.ids(json.dumps(rows, indent=2)))


WORKLOADS: dict[str, Callable[[Texts], Iterator[Task]]] = {
    "whole-file edits": _whole_files,
    "edits by agents": _agents_edits,
    "steps of an agent": _recorded("steps of an agent"),
    "chat": _recorded("chat"),
    "code": _recorded("code"),
    "second request": _second_requests,
    "JSON": _json,
}


def named(names: Sequence[str]) -> list[str]:
    """The workloads whose names begin so; all for none. Raises ValueError."""
    for name in names:
        if not any(known.startswith(name) for known in WORKLOADS):
            raise ValueError(f"no such workload: {name}; there are {', '.join(WORKLOADS)}")
    return [known for known in WORKLOADS if not names or known.startswith(tuple(names))]
