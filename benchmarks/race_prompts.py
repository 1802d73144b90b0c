"""The requests of the race, by workload. The same installation always makes the same ones.

- `chat`: the first turns of MT-Bench
- `copy`: a function of the standard library, twice, and its first lines once more; the model completes the text
- `edit`: the same, but in the second and third place the function has a name changed
- `stored code`: a file of the standard library up to the first line of a function; the datastore holds this file
- `new code`: the same of the installed packages, which the datastore lacks
- `JSON`: a table as JSON, with a schema
- `second turn`: the first turn of MT-Bench with a recorded answer, which the model is asked to repeat
- `agents`: recorded sessions of a coding agent, turn by turn. Each turn sends the conversation so far with the recorded
  answers, whatever the model wrote
"""

from __future__ import annotations

import gzip
import json
import keyword
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from benchmarks.library import functions_in, standard_library

QUESTIONS, ANSWERS = "mt_bench_questions.jsonl", "mt_bench_answers_vicuna-7b-v1.5.jsonl"
SESSIONS = "agents_mini_swe_gemini3.jsonl.gz"
LONGEST_SESSION = 22_000  # Characters of a conversation: about 6 500 tokens, and the context of SmolLM2 has 8 192.
SHORTEST, LONGEST = 700, 1000  # Characters of a text to repeat. 200 tokens are about 700.
CONTEXT = 1200  # Characters of a file before the function to complete.
RECORDS = 5


@dataclass(frozen=True)
class Prompt:
    """One request. `before` is sent first and not timed. A good answer begins with `expected`, if that is known."""

    name: str
    path: str
    body: dict[str, Any]
    before: dict[str, Any] | None = None
    expected: str = ""


def prompts(workload: str, count: int, tokens: int, data: Path | None) -> list[Prompt]:
    """Return `count` prompts, or all if there are fewer, with answers of at most `tokens` tokens.

    Raises FileNotFoundError if the workload needs recorded questions and `data` does not have them.
    """
    common = {"temperature": 0, "max_tokens": tokens}
    every = list(WORKLOADS[workload](data))
    return [
        replace(each, body=each.body | common, before=each.before and each.before | common)
        for each in (every[:count] if workload in IN_ORDER else spread(every, count))
    ]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` items at equal distances, or all if there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _complete(name: str, text: str, expected: str = "") -> Prompt:
    return Prompt(name, "/v1/completions", {"prompt": text}, expected=expected)


def _ask(name: str, *messages: str, **more: Any) -> Prompt:
    """Return a conversation that begins with the user's message. The first of several turns is sent before."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)]
    before = {"messages": turns[:1]} if len(turns) > 1 else None
    return Prompt(name, "/v1/chat/completions", {"messages": turns, **more}, before)


def _rows(data: Path | None, name: str) -> dict[int, dict[str, Any]]:
    rows = map(json.loads, _file(data, name).read_text("utf-8").splitlines())
    return {row["question_id"]: row for row in rows}


def _file(data: Path | None, name: str) -> Path:
    if data is None or not (data / name).is_file():
        raise FileNotFoundError(f"{name} is not there; give --data FOLDER")
    return data / name


def _chat(data: Path | None) -> Iterator[Prompt]:
    for number, row in _rows(data, QUESTIONS).items():
        yield _ask(f"{number}", row["turns"][0])


def _second_turn(data: Path | None) -> Iterator[Prompt]:
    answers = _rows(data, ANSWERS)
    for number, row in _rows(data, QUESTIONS).items():
        answer = answers[number]["choices"][0]["turns"][0].removesuffix("</s>")
        if len(answer) <= 2 * LONGEST:
            asked = _ask(f"{number}", row["turns"][0], answer, "Repeat your answer, word for word.")
            yield replace(asked, expected=answer)


def _sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of the Python files of a folder without tests, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not {"test", "tests", "idlelib", "site-packages", "dist-packages", "rest_local"} & set(name.parts):
            yield name.as_posix(), path.read_text("utf-8", "replace")


def _functions() -> Iterator[tuple[str, str]]:
    """Yield one function of each file of the standard library that has one of a suitable length."""
    for name, text in _sources(standard_library()):
        found = (each for each in functions_in(text, LONGEST) if each.startswith("def ") and len(each) >= SHORTEST)
        if function := next(found, None):
            yield name, function


def _again(name: str, code: str, again: str) -> Prompt:
    """Let the model write `again` once more after `code` and `again`. A small model copies what was copied before."""
    begun = again[: again.index("\n", len(again) // 10)]
    return _complete(name, f"{code}\n\n{again}\n\n{begun}", again[len(begun) :])


def _copy(data: Path | None) -> Iterator[Prompt]:
    for name, code in _functions():
        yield _again(name, code, code)


def _edit(data: Path | None) -> Iterator[Prompt]:
    for name, code in _functions():
        words = Counter(word for word in re.findall(r"\b[a-z]\w{2,}\b", code) if not keyword.iskeyword(word))
        old = next(word for word, _ in words.most_common())
        yield _again(name, code, re.sub(rf"\b{old}\b", f"{old}_value", code))


def _beginnings(folder: Path) -> Iterator[Prompt]:
    for name, text in _sources(folder):
        found = re.compile(r"(?m)^ *def \w+\(.*\):\n").search(text, CONTEXT)
        if found and len(text) - found.end() > CONTEXT:
            at = text.rfind("\n", 0, found.end() - CONTEXT) + 1
            yield _complete(name, text[at : found.end()])


def _stored_code(data: Path | None) -> Iterator[Prompt]:
    return _beginnings(standard_library())


def _new_code(data: Path | None) -> Iterator[Prompt]:
    return _beginnings(Path(sysconfig.get_paths()["purelib"]))


def _json(data: Path | None) -> Iterator[Prompt]:
    statuses = [each for each in HTTPStatus if each.description]
    names = ("code", "phrase", "description")
    row = {
        "type": "object",
        "properties": {name: {"type": "integer" if name == "code" else "string"} for name in names},
        "required": names, "additionalProperties": False,
    }  # fmt: skip
    schema = {"type": "object", "properties": {"codes": {"type": "array", "items": row}}, "required": ["codes"]}
    form = {"type": "json_schema", "json_schema": {"name": "codes", "strict": True, "schema": schema}}
    for at in range(len(statuses) - RECORDS):
        table = "".join(f"{each.value} | {each.phrase} | {each.description}\n" for each in statuses[at : at + RECORDS])
        asked = f"Write this table of status codes as JSON with the keys {', '.join(names)}.\n\n{table}"
        yield _ask(f"{statuses[at].value}", asked, response_format=form)


def _agents(data: Path | None) -> Iterator[Prompt]:
    with gzip.open(_file(data, SESSIONS), "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            messages = row["body"]["messages"]
            if sum(len(message["content"]) for message in messages) <= LONGEST_SESSION:
                answer = row["response"]["body"]["choices"][0]["message"]["content"]
                yield Prompt(row["custom_id"], "/v1/chat/completions", {"messages": messages}, expected=answer)


WORKLOADS: dict[str, Callable[[Path | None], Iterator[Prompt]]] = {
    "chat": _chat,
    "copy": _copy,
    "edit": _edit,
    "stored code": _stored_code,
    "new code": _new_code,
    "JSON": _json,
    "second turn": _second_turn,
    "agents": _agents,
}
NEED_TEMPLATE = {"chat", "JSON", "second turn", "agents"}
IN_ORDER = {"agents"}  # A prompt goes on from the one before.
