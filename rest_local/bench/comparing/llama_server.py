"""llama.cpp's own server as sides of a comparison: without drafts, with each of its n-gram types, and with heads.

The binary is the user's own. Each side starts it on a free port of this machine and ends it. All sides have the same
model, context, threads and arguments; what a side drafts with has the server's default settings. The environment
variables that give llama-server options are left out.

Prompts go to `POST /completion` as token ids. Tokens, time and counts of drafts come from its answer. N-gram types that
remember earlier requests get a new server for each task, so that none knows an answer from a run before it.

Whatever goes wrong becomes SideFailed with the last lines that the server wrote. Time limits are in proportion to the
plain server (`Pace`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rest_local.bench.comparing.program import ProgramFailed, output_of
from rest_local.bench.comparing.server import Server, ServerFailed
from rest_local.bench.comparing.sides import Run, Side, SideFailed, Task

NAME = "llama-server"
HELP_SECONDS, HELP_BYTES = 60.0, 2**20
PLAIN = "none"
FORGETFUL = ("none", "ngram-simple")
"""Types without memory of earlier requests, besides those with a model. The others share tables between requests, or do
not clear them well."""


@dataclass(frozen=True)
class Binary:
    """A llama-server. `kinds`: its speculative types; none if it is too old for `--spec-type`."""

    path: str
    version: str
    kinds: tuple[str, ...]
    options: frozenset[str]

    @classmethod
    def of(cls, name: str | os.PathLike[str], seconds: float = HELP_SECONDS) -> Binary:
        """Ask it for its version and its help. `name`: a path, or found in PATH. Raises ProgramFailed."""
        path = shutil.which(name)
        if path is None:
            there = Path(name).exists()
            raise ProgramFailed(f"{os.fspath(name)}: {'not an executable program' if there else 'no such program'}")
        said = output_of([path, "--version"], seconds, HELP_BYTES, environment())
        version = re.search(r"^version: *(\S.*)", said, re.MULTILINE)
        described = output_of([path, "--help"], seconds, HELP_BYTES, environment())
        options = frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", described))
        if version is None or not {"--model", "--port", "--ctx-size"} <= options:
            raise ProgramFailed(f"{path}: not a llama-server, by what it writes for --version and --help")
        return cls(path, version[1].strip()[:100], tuple(_kinds(described)), options)

    def known(self, *argument: str) -> tuple[str, ...]:
        """An argument and its value; nothing if the binary does not have it."""
        return argument if argument[0] in self.options else ()


def _kinds(described: str) -> Iterator[str]:
    """The types in the help of `--spec-type a,b,c`."""
    if found := re.search(r"--spec-type\s+([a-z0-9,\s-]*?)(?=\s{2,}[a-z]|\s--|\n\s*\n|$)", described):
        yield from dict.fromkeys(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", found[1]))


def environment() -> dict[str, str]:
    """This process's, without what llama-server would take as options. Threads wait as in this project's contexts."""
    from rest_local.llama.cores import set_spin_defaults

    found = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG_", "LLAMA_API_KEY"))}
    set_spin_defaults(found)
    return found


@dataclass
class Pace:
    """Time limits of a server, from what the plain one took: `factor` times its time, and at least `least` seconds.

    `first_start`, `first_answer`: limits in seconds as long as nothing is known. A model that a disk reads at 50 MB/s
    starts within `first_start` up to 30 GB.
    """

    factor: float = 20.0
    least: float = 30.0
    first_start: float = 600.0
    first_answer: float = 600.0
    _start: float = 0.0
    _per_token: float = 0.0

    def started(self, seconds: float) -> None:
        """The plain server was ready after this time."""
        self._start = max(self._start, seconds)

    def answered(self, task: Task, seconds: float) -> None:
        """The plain server took this time for a task, with its prompt."""
        self._per_token = max(self._per_token, seconds / _size(task))

    def start_limit(self) -> float:
        """Seconds."""
        return max(self.least, self.factor * self._start) if self._start else self.first_start

    def answer_limit(self, task: Task) -> float:
        """Seconds."""
        return max(self.least, self.factor * self._per_token * _size(task)) if self._per_token else self.first_answer


def _size(task: Task) -> int:
    return len(task.prompt) + task.max_tokens


class LlamaServer:
    """A `Side`: the server with one kind of drafts. `kind`: of its `--spec-type`, PLAIN: none. `head`: its model."""

    def __init__(
        self, binary: Binary, model: Path, arguments: Sequence[str], pace: Pace, kind: str, head: Path | None = None
    ) -> None:
        self.name = NAME if kind == PLAIN else f"{NAME} {kind}"
        self._binary, self._kind, self._pace = binary, kind, pace
        self._forgetful = kind in FORGETFUL or not kind.startswith("ngram-")
        drafts = () if kind == PLAIN else ("--spec-type", kind, *(("-md", os.path.abspath(head)) if head else ()))
        self._arguments = ("-m", os.path.abspath(model), *arguments, *drafts)
        self._server: Server | None = None
        self._used = False
        self.options: dict[str, Any] = {
            "program": NAME,
            "kind": kind,
            "version": binary.version,
            "arguments": [*arguments, *(("--spec-type", kind) if kind != PLAIN else ())],
            "head": head.name if head else None,
            "new_server_for_each_task": not self._forgetful,
        }

    def open(self) -> None:
        """See `Side`."""
        if self._kind not in (PLAIN, *self._binary.kinds):
            known = ", ".join(self._binary.kinds) or "none"
            raise SideFailed(
                self.name, f"version {self._binary.version} has no --spec-type {self._kind}, only: {known}"
            )
        self._start()

    def run(self, task: Task) -> Run:
        """See `Side`. A task that exceeds the context is refused by the server, and so fails the side."""
        with ExitStack() as failed:
            failed.callback(self.close)
            if self._used and not self._forgetful:
                self.close()
                self._start()
            run = self._answered(task)
            failed.pop_all()
        return run

    def close(self) -> None:
        """See `Side`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._used = False

    def _answered(self, task: Task) -> Run:
        if self._server is None:
            raise SideFailed(self.name, "not open")
        self._used = True
        try:
            answer, seconds = self._server.post("/completion", completion_body(task), self._pace.answer_limit(task))
            run = _run(answer)
        except ServerFailed as error:
            raise SideFailed(self.name, str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise SideFailed(self.name, f"not an answer of llama-server ({type(error).__name__}: {error})") from error
        if self._kind == PLAIN:
            self._pace.answered(task, seconds)
        return run

    def _start(self) -> None:
        with ExitStack() as failed:
            failed.callback(self.close)
            try:
                self._server = Server([self._binary.path, *self._arguments], environment=environment())
                seconds = self._server.start(self._pace.start_limit())
            except ServerFailed as error:
                raise SideFailed(self.name, str(error)) from error
            failed.pop_all()
        if self._kind == PLAIN:
            self._pace.started(seconds)


def completion_body(task: Task) -> dict[str, Any]:
    """What `POST /completion` takes. The request does not use the cache of the one before."""
    body = {
        "prompt": list(task.prompt), "n_predict": task.max_tokens, "temperature": task.temperature, "seed": task.seed,
        "return_tokens": True, "cache_prompt": False, "stream": False,
    }  # fmt: skip
    return body if task.schema is None else {**body, "json_schema": task.schema}


def _run(answer: Mapping[str, Any]) -> Run:
    """The first token comes from the prefill, so all other tokens take `predicted_ms`. Each step gives one token and
    those that it accepted. An end token is no part of the answer. Raises KeyError, TypeError or ValueError for what
    llama-server does not answer.
    """
    timings, tokens = answer["timings"], answer["tokens"]
    ms, drafted, accepted = timings["predicted_ms"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise TypeError("`tokens` are not token ids")
    if not isinstance(ms, (int, float)) or not isinstance(drafted, int) or not isinstance(accepted, int):
        raise TypeError("`timings` are not numbers")
    if not (0 <= ms < float("inf") and 0 <= accepted <= drafted):
        raise ValueError(f"`timings` say {ms} ms, {accepted} of {drafted} drafted tokens accepted")
    steps = max(len(tokens) - 1 - accepted, 0)
    ended = answer.get("stop_type") == "eos"
    return Run(tokens[:-1] if ended else tokens, float(ms), steps, drafted, accepted)


@dataclass
class Absent:
    """A `Side` that cannot be opened. `cause`: why."""

    cause: str
    name: str = NAME
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """See `Side`."""
        raise SideFailed(self.name, self.cause)

    def run(self, task: Task) -> Run:
        """See `Side`."""
        raise SideFailed(self.name, self.cause)

    def close(self) -> None:
        """See `Side`."""


def sides_of(
    binary: str | os.PathLike[str],
    model: Path,
    heads: Mapping[str, Path | None],
    threads: int,
    n_ctx: int,
    *,
    arguments: Sequence[str] = (),
    pace: Pace | None = None,
) -> list[Side]:
    """The sides of a binary: without drafts, each n-gram type that it has, and `heads`.

    Never fails: a binary that cannot be used gives one side whose `open` says why. Starts it twice, for a second.

    binary     a path, or a name in PATH
    heads      by type: "draft-simple", "draft-eagle3", "draft-mtp"; None: the MTP layers in the model's own file
    n_ctx      tokens, at least the longest prompt with its answer
    arguments  more arguments of every server, such as ("-ngl", "99")
    """
    try:
        found = Binary.of(binary)
    except ProgramFailed as error:
        return [Absent(str(error))]
    shared = (
        *("-c", str(n_ctx), "-np", "1", "-t", str(threads)),
        *found.known("--flash-attn", "off"),  # as this project's contexts compute
        *found.known("--swa-full"),
        *found.known("--ctx-checkpoints", "0"),
        *found.known("--offline"),
        *found.known("--log-colors", "off"),
        *arguments,
    )
    kinds: dict[str, Path | None] = {PLAIN: None}
    kinds |= dict.fromkeys(kind for kind in found.kinds if kind.startswith("ngram-"))
    kinds |= heads
    pace = pace or Pace()
    return [LlamaServer(found, model, shared, pace, kind, head) for kind, head in kinds.items()]
