"""The parts of the suite: which commands make which results. A part knows its arguments; it imports no measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HASHED = 1 << 20  # bytes of a model that tell it from another one of the same size
EDITS = 12  # of the checkout: each replays a whole file, 4 s with all curves
QUICK_EDITS = 4


@dataclass(frozen=True)
class Part:
    """One measurement.

    name       in messages and in the report
    file       the name of its result in the folder
    arguments  of `rest-local`; the folder and --quick are added to them
    options    what the figures depend on, JSON-ready
    missing    why it cannot run here, "" if it can
    """

    name: str
    file: str
    arguments: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """The arguments of `rest-local`."""
        return [*self.arguments, "--out", str(folder), *["--quick"] * quick]

    @property
    def journal(self) -> str:
        """The name of the file with what is measured of an unfinished run, if this part has one."""
        return f"{Path(self.file).stem}.journal"


@dataclass(frozen=True)
class Choice:
    """The options of the suite. `default`: the user named no model; `data`: the folder of recorded answers; `server`:
    llama.cpp's, of the user.
    """

    model: Path
    default: bool = True
    data: Path | None = None
    server: Path | None = None
    quick: bool = False

    @property
    def given(self) -> list[str]:
        """The arguments that all measurements take."""
        data = [] if self.data is None else ["--data", str(self.data)]
        return [*data, *([] if self.default else ["-m", str(self.model)])]


def parts(choice: Choice) -> list[Part]:
    """All parts, in the order in which they run: what answers most first. Raises OSError."""
    from rest_local.bench.experiments.catalog import EXPERIMENTS

    model = {"model": digest(choice.model)}
    found = [_compare(choice, model), *_replays(choice)]
    options = {**model, "data": digest_of_folder(choice.data)}
    for name in EXPERIMENTS:
        arguments = ["bench", "experiment", name, *choice.given]
        found.append(Part(f"experiment {name}", f"experiment-{name}.json", arguments, options))
    return found


def _compare(choice: Choice, model: Mapping[str, Any]) -> Part:
    arguments = ["bench", "compare", *choice.given]
    arguments += [] if choice.server is None else ["--llama-server", str(choice.server)]
    options = {**model, "data": digest_of_folder(choice.data), "llama_server": digest(choice.server)}
    return Part("compare", "compare.json", arguments, options)


ANSWERS = {  # file, vocabulary of the model that gave the answers, further arguments
    "HumanEval": ("HumanEval.jsonl.gz", "ggml-vocab-qwen2.gguf", ()),
    "MT-Bench": ("mt_bench_answers_vicuna-7b-v1.5.jsonl", "ggml-vocab-llama-spm.gguf", ()),
    "AlpacaEval": (
        "alpaca_eval_outputs_llama-3-8b-instruct.jsonl",
        "ggml-vocab-llama-bpe.gguf",
        ("--history", "40"),
    ),
}
"""Recorded answers, as `rest_local.bench.experiments.inputs` has them; AlpacaEval with its other answers as history."""

SLOW = ("AlpacaEval",)  # its 800 answers are tokenized first: not with --quick


def _replays(choice: Choice) -> Iterator[Part]:
    from rest_local.bench import replayed

    for name, (file, vocabulary, more) in ANSWERS.items():
        if choice.quick and name in SLOW:
            continue
        history = dict(zip(more[::2], more[1::2], strict=True)).get("--history")
        result = replayed.file_name([Path(file)], [], predict=False, history=history)
        if choice.data is None:
            yield Part(f"replay {name}", result, (), missing="no folder of recorded answers; give --data DIR")
            continue
        paths = [choice.data / file, choice.data / vocabulary]
        absent = [path.name for path in paths if not path.is_file()]
        arguments = ["bench", "replay", str(paths[0]), "--vocab", str(paths[1]), *more]
        options = {"inputs": [digest(path) for path in paths if path.is_file()]}
        missing = f"{' and '.join(absent)}: not in the folder {choice.data.name}" if absent else ""
        yield Part(f"replay {name}", result, arguments, options, missing)
    yield _edits(choice)


def _edits(choice: Choice) -> Part:
    """The edits in the history of the checkout that this package is part of."""
    from rest_local.bench import replayed

    checkout = Path(__file__).resolve().parents[3]
    result = replayed.EDITS_FILE
    if not (checkout / ".git").exists():
        return Part("replay edits", result, (), missing="this is an installed package, with no history of edits")
    known = None if choice.data is None else choice.data / "ggml-vocab-qwen2.gguf"
    vocabulary = known if known is not None and known.is_file() else choice.model
    edits = QUICK_EDITS if choice.quick else EDITS
    arguments = ["bench", "replay", "--git", str(checkout), "--edits", str(edits), "--predict"]
    return Part("replay edits", result, [*arguments, "--vocab", str(vocabulary)], {"vocabulary": digest(vocabulary)})


def digest(path: Path | None) -> str:
    """The beginning of a hash of a file's size and first bytes; "" for none. Raises OSError."""
    if path is None:
        return ""
    with path.open("rb") as file:
        return hashlib.sha256(b"%d " % path.stat().st_size + file.read(HASHED)).hexdigest()[:16]


def digest_of_folder(folder: Path | None) -> str:
    """Of the names and sizes of a folder's files; "" for none. Raises OSError."""
    if folder is None:
        return ""
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]
