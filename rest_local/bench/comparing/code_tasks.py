"""Tasks on code: completion in a repository, edits, many completions at once, HumanEval.

Without a repository, completion and edits are those of the held-out modules of the standard library, which neither the
demo model nor the demo's datastore has seen. With one, files of its working tree are completed, which the datastore
leaves out, and the edits are those of its history.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rest_local.bench.comparing.prompting import Prompting, spread
from rest_local.bench.comparing.sides import Task
from rest_local.bench.prompts import (
    SOURCE_FILES,
    begin_of,
    function_of,
    held_out_modules,
    rename_request,
    standard_library,
)
from rest_local.bench.workload import load_edits
from rest_local.errors import InputInvalid
from rest_local.llama.vocabulary import Detokenizer

LEAST, MOST = 2_000, 100_000  # bytes of a file whose second part is to be completed
EDITS = 60  # of a repository, searched for as many as fit the context


@dataclass(frozen=True)
class Source:
    """A file to complete. name: its path in the repository."""

    name: str
    text: str


def held_out() -> list[Source]:
    """Raises OptionError where an installation is incomplete, OSError."""
    library = standard_library()
    names = [name for name in held_out_modules() if (library / name).is_file()]
    return [Source(name, (library / name).read_text("utf-8")) for name in names]


def files_of(repository: Path, n: int) -> list[Source]:
    """`n` source files of a working tree, at equal distances. Raises InputInvalid where there is none."""
    found = [path for path in sorted(repository.rglob("*")) if _is_source(path, repository)]
    if not found:
        raise InputInvalid("repository", repository, f"holds no source file of {LEAST} to {MOST} bytes")
    chosen = spread(found, n)
    return [Source(path.relative_to(repository).as_posix(), path.read_text("utf-8", "replace")) for path in chosen]


def _is_source(path: Path, repository: Path) -> bool:
    parts = path.relative_to(repository).parts
    if path.suffix not in SOURCE_FILES or any(part.startswith(".") or part == "node_modules" for part in parts):
        return False
    return path.is_file() and LEAST <= path.stat().st_size <= MOST


def completions(prompting: Prompting, sources: Sequence[Source], tokens: int) -> Iterator[Task]:
    """The beginning of each file up to a function."""
    for source in sources:
        prompt = prompting.text(begin_of(source.text, 900)[-1600:])
        yield Task(source.name, "completion", prompt, tokens)


def together(prompting: Prompting, sources: Sequence[Source], tokens: int) -> Iterator[Task]:
    """Later places of the same files, for many requests at once."""
    for source in sources:
        rest = source.text[len(source.text) // 2 :].partition("\n")[2]
        yield Task(source.name, "batch", prompting.text(begin_of(rest, 600)[-1200:]), tokens)


def renamings(prompting: Prompting, sources: Sequence[Source], tokens: int) -> Iterator[Task]:
    """Requests to rename a name in a function, with the function as prediction."""
    for source in sources:
        if function := function_of(source.text):
            question, beginning = rename_request(function)
            yield Task(source.name, "edit", prompting.question(question, beginning), tokens, prediction=function)


def edits(prompting: Prompting, repository: Path, tokens: int) -> Iterator[Task]:
    """Edits of the history, the newest first, with the old text as prediction. Raises InputInvalid."""
    for edit in load_edits(repository, prompting.vocabulary, EDITS, predict=True):
        detokenizer = Detokenizer(prompting.vocabulary.piece)
        old = "".join(detokenizer.feed(int(token)) for token in edit.prediction) + detokenizer.finish()
        task = Task(edit.name, "edit", edit.prompt, tokens, prediction=old)
        yield replace(task, prompt=[*prompting.text(""), *edit.prompt])


def humaneval(prompting: Prompting, path: Path, n: int, tokens: int) -> Iterator[Task]:
    """Raises InputInvalid, OSError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            problems = [json.loads(line) for line in file if line.strip()]
        for problem in spread(problems, n):
            yield Task(str(problem["task_id"]), "humaneval", prompting.text(problem["prompt"]), tokens)
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise InputInvalid("file", path, f"does not hold the problems of HumanEval ({error!r})") from error
