"""Load the data of a replay: recorded answers of real models, edits of a repository, earlier answers, datastores.

The fields of a line tell its format: MT-Bench answers (with their questions in the same folder), AlpacaEval
outputs, HumanEval problems, or OpenAI batch lines with request and response. Any other line is an error.

Edits are changes of files in the history of a git repository, as a coding assistant would write them, the newest first.
The prompt is the commit message, the old file and the unchanged beginning of the new file. The answer is the rest of
the new file, from the first changed token on. The repository is read through `git` and not changed. Merges, new files,
deletions, renames, binary files and long files are left out.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rest_local.drafting.sources import Sources
from rest_local.errors import InputInvalid, OptionError
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.sources.listing import git_command, git_environment, run_git
from rest_local.stop import Closing

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Recorded:
    """A recorded answer: the token ids of its prompt, of the answer, and of the prediction that the client sends."""

    name: str
    prompt: list[int]
    answer: list[int]
    prediction: Sequence[int] = ()


def load(path: Path, vocabulary: Vocabulary) -> list[Recorded]:
    """Read every answer of a file, in order. Raises InputInvalid if there is none, KeyError or ValueError for a line of
    another format, and OSError.
    """
    found = []
    for number, line in enumerate(_lines(path), 1):
        for name, prompt, answer in _texts(line, path, number):
            ids = [vocabulary.tokenize(text, special=False).tolist() for text in (prompt, answer)]
            found.append(Recorded(name, *ids))
    if not found:
        raise InputInvalid("file", path, "holds no recorded answer")
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file. One line is in memory at a time."""
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def _texts(line: Mapping[str, Any], path: Path, number: int) -> Iterator[tuple[str, str, str]]:
    """Yield name, prompt and answer of each answer in a line."""
    if "choices" in line and "question_id" in line:
        yield from _mt_bench(line, path)
    elif "instruction" in line:
        yield str(number), f"{line['instruction']}\n", line["output"]
    elif "canonical_solution" in line:
        yield line.get("task_id", str(number)), line["prompt"], line["canonical_solution"]
    else:
        yield _batch(line, number)


def _mt_bench(line: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the turns in Vicuna's conversation template, because the shipped answers are Vicuna's."""
    questions = {each["question_id"]: each for each in _lines(path.parent / "mt_bench_questions.jsonl")}
    turns = questions[line["question_id"]]["turns"]
    text = VICUNA
    for turn, (question, answer) in enumerate(zip(turns, line["choices"][0]["turns"], strict=True), 1):
        text += f" USER: {question} ASSISTANT:"
        yield f"{line['question_id']}.{turn}", text, f" {answer}"
        text += f" {answer}</s>"


def _batch(line: Mapping[str, Any], number: int) -> tuple[str, str, str]:
    """Return a request and its response. Roles become words, because the model's chat template is unknown here."""
    name, body, answer = line.get("custom_id", str(number)), line["body"], line["response"]["body"]["choices"][0]
    if "messages" not in body:
        return name, body["prompt"], answer["text"]
    parts = [f"{message['role']}: {_plain(message['content'])}\n" for message in body["messages"]]
    return name, "".join(parts), _plain(answer["message"]["content"])


def _plain(content: Any) -> str:
    """Return the text of a message: a string, or its text parts. A refusal or a tool call has none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


EDITS = 100  # maximum edits per repository
PER_COMMIT = 3  # maximum files per commit, so that one large commit is not the whole workload
MAX_BYTES = 32 * 2**10  # about 10 000 tokens: the old and the new file together fit a context of 32 k
MIN_BYTES = 200
COMMITS = 5000  # number of commits to search


def load_edits(repository: Path, vocabulary: Vocabulary, most: int = EDITS, *, predict: bool = False) -> list[Recorded]:
    """Tokenize the newest `most` changes of files in the history of HEAD. With `predict` the rest of the old file is
    the prediction. Raises InputInvalid if there is no repository or no such change, and RestLocalError without git.
    """
    if not repository.is_dir():
        raise InputInvalid("repository", repository, "no such directory")
    found = []
    for commit, message, path, old, new in edits_of(repository):
        recorded = whole_file_edit(path, message, old, new, vocabulary)
        prediction = recorded.prediction if predict else ()
        found.append(replace(recorded, name=f"{commit[:10]}:{path}", prediction=prediction))
        if len(found) == most:
            break
    if not found:
        raise InputInvalid(
            "repository",
            repository,
            f"no commit changes a text file of {MIN_BYTES} to {MAX_BYTES} bytes; give one with a history of edits",
        )
    return found


def edits_of(repository: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (commit, message, path, old text, new text) of each change within the limits, the newest first."""
    log = run_git(
        repository, "log", f"--max-count={COMMITS}", "--no-merges", "--no-renames", "--diff-filter=M", "--raw",
        "--no-abbrev", "--no-color", "--format=%x00%H%x00%B%x00", "HEAD", "--",
    )  # fmt: skip
    if log.returncode:
        lines = log.stderr.decode("utf-8", "replace").strip().splitlines() or [f"git exits with {log.returncode}"]
        raise InputInvalid("repository", repository, lines[0])
    parts = iter(log.stdout.decode("utf-8", "replace").split("\0")[1:])  # no message contains a NUL
    with Blobs(repository) as blobs:
        for commit, message, changes in zip(parts, parts, parts, strict=True):
            for path, *changed in _regular(changes.strip().splitlines())[:PER_COMMIT]:
                old, new = (_text(blobs.read(blob, MAX_BYTES)) for blob in changed)
                if old is not None and new is not None and old != new:
                    yield commit, message, path, old, new


@dataclass(slots=True)
class Blobs(Closing):
    """A process `git cat-file --batch`, started at the first question."""

    repository: Path
    _process: subprocess.Popen[bytes] | None = None

    def read(self, blob: str, most: int = sys.maxsize) -> bytes | None:
        """Return the content of a blob, or None if it is missing or has more than `most` bytes."""
        if self._process is None:
            command, pipe = git_command(self.repository, "cat-file", "--batch"), subprocess.PIPE
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=git_environment()
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{blob}\n".encode())
            process.stdin.flush()
            head = process.stdout.readline().split()
            if len(head) != 3 or not head[2].isdigit():
                return None
            size = int(head[2])
            data = process.stdout.read(min(size, most))
            left = size + 1 - len(data)  # a line feed follows the content
            while left and (skipped := process.stdout.read(min(left, 1 << 20))):
                left -= len(skipped)
            return data if size <= most else None
        except BrokenPipeError:  # git gave up on a damaged object
            self.close()
            return None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


def _text(data: bytes | None) -> str | None:
    """Return the text of a blob, or None if it is missing, not text, or outside the size limits."""
    if data is None or len(data) < MIN_BYTES or b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def whole_file_edit(path: str, message: str, old: str, new: str, vocabulary: Vocabulary) -> Recorded:
    """Make a replay of an edit: the answer is the new file from the first change on, the prediction the old one."""
    head, before, after = (
        vocabulary.tokenize(text, special=False).tolist() for text in (f"{message.strip()}\n\n{path}:\n", old, new)
    )
    shorter = min(len(before), len(after))
    same = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    between = vocabulary.tokenize(f"\n{path}, changed:\n", special=False).tolist()
    return Recorded(path, [*head, *before, *between, *after[:same]], after[same:], before[same:])


def _regular(changes: Sequence[str]) -> list[tuple[str, str, str]]:
    """Parse (path, old blob, new blob) from lines `:100644 100644 OLD NEW M<tab>PATH`."""
    found = []
    for line in changes:
        fields, _, path = line.partition("\t")
        old_mode, new_mode, old, new, _ = fields.lstrip(":").split()
        if old_mode.startswith("100") and new_mode.startswith("100"):
            found.append((path, old, new))
    return found


@dataclass
class Workload:
    """The data of a replay. `earlier` answers serve as the model's history; None means no history."""

    tested: list[Recorded]
    earlier: list[list[int]] | None
    n_vocab: int
    stores: list[Datastore] = field(default_factory=list)
    _history: GrowingText | None = None

    def sources(self) -> Sources:
        if self.earlier is not None and self._history is None:
            self._history = GrowingText()
            for answer in self.earlier:
                self._history.extend([*answer, -1])
        return Sources(self.stores, self.n_vocab, self._history)

    @property
    def tokens(self) -> int:
        return sum(len(answer.answer) for answer in self.tested)


@contextmanager
def open_workload(
    vocabulary: Vocabulary,
    *,
    files: Sequence[Path] = (),
    repositories: Sequence[Path] = (),
    edits: int = EDITS,
    predict: bool = False,
    datastores: Sequence[str] = (),
    history: str | None = None,
    limit: int | None = None,
) -> Iterator[Workload]:
    """Open files and datastores. A `history` of "N" or "N:" tests the first N answers with the others as history;
    anything else is a file of earlier answers. At most `limit` answers are tested. Raises OptionError, InputInvalid,
    DatastoreError, OSError.
    """
    recorded = [answer for path in files for answer in load(path, vocabulary)]
    for repository in repositories:
        recorded += load_edits(repository, vocabulary, edits, predict=predict)
    if not recorded:
        raise OptionError("nothing to replay: name a file of recorded answers, or a repository with --git")
    tested, earlier = _split(recorded, history, vocabulary)
    with ExitStack() as opened:
        workload = Workload(tested[:limit], earlier, vocabulary.size)
        for name in datastores:
            path = datastore_path(name)
            store = Datastore.open(path, vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name)
            workload.stores.append(opened.enter_context(store))
        yield workload


def _split(
    recorded: list[Recorded], history: str | None, vocabulary: Vocabulary
) -> tuple[list[Recorded], list[list[int]] | None]:
    if history is None:
        return recorded, None
    number = history.removesuffix(":")
    if not number.isdecimal():
        return recorded, [answer.answer for answer in load(Path(history), vocabulary)]
    n = int(number)
    if not 0 < n < len(recorded):
        raise OptionError(f"--history {history}: there are {len(recorded)} answers; test 1 to {len(recorded) - 1}")
    return recorded[:n], [answer.answer for answer in recorded[n:]]
