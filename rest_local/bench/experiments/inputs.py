"""What an experiment measures with: the model, recorded answers, text for datastores, the seed and the size of the run.

- Recorded answers are files of the data folder, each with the vocabulary of the model that gave them (`ANSWERS`). A
  missing file is an InputInvalid that names it.
- Text is that of the given folders, without any the Python sources that are installed on this machine: the modules
  that the demo model has memorised, the rest of the standard library, then packages. Held-out modules of the demo and
  tests are left out. Beyond the end of the text, documents are edited copies (`bench.generated`), and
  `Text.record` says how many.

The module knows nothing about single experiments.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.bench.generated import edited, ends_of_paragraphs, up_to
from rest_local.bench.prompts import LEFT_OUT, held_out_modules, standard_library, well_known_modules
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.replay import counted
from rest_local.bench.results import Journal
from rest_local.errors import CorpusEmpty, InputInvalid, RestLocalError
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.segment import Segment
from rest_local.retrieval.sources.corpus import Filters, list_files, measure, read_files
from rest_local.retrieval.sources.skipped import Skipped

SOURCE = ("*.py",)
NOT_TEXT = ("test/", "tests/", "idle_test/", "*.dist-info/", "licenses/", "LICENSE*")  # of packages
TOGETHER = 64  # texts that are tokenized in one call
HASHED = 1 << 20  # bytes of a model that tell it from another one of the same size


@dataclass(frozen=True)
class AnswerSet:
    """Files of the data folder: recorded answers, and the vocabulary of the model that gave them. kind: of text."""

    file: str
    vocabulary: str
    kind: str


ANSWERS = {
    "HumanEval": AnswerSet("HumanEval.jsonl.gz", "ggml-vocab-qwen2.gguf", "code"),
    "MT-Bench": AnswerSet("mt_bench_answers_vicuna-7b-v1.5.jsonl", "ggml-vocab-llama-spm.gguf", "chat"),
    "AlpacaEval": AnswerSet("alpaca_eval_outputs_llama-3-8b-instruct.jsonl", "ggml-vocab-llama-bpe.gguf", "chat"),
}


@dataclass(frozen=True)
class Text:
    """Documents for a datastore. real: tokens of files as they are; the others belong to edited copies."""

    documents: Sequence[Int32Array]
    vocab_size: int
    real: int
    source: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))

    def first(self, tokens: int) -> Text:
        """The first `tokens` tokens. Smaller texts are the beginnings of larger ones."""
        documents = list(up_to(self.documents, tokens)) if tokens else []
        return Text(documents, self.vocab_size, min(self.real, tokens), self.source)

    def segment(self) -> Segment:
        """A datastore in memory: 6 to 7 bytes a token, and as much again while it is sorted."""
        return Segment.of(self.documents, self.vocab_size)

    def record(self) -> dict[str, Any]:
        """For a result. JSON-ready."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(np.ascontiguousarray(document, np.int32).tobytes())
        return {
            "source": self.source,
            "documents": len(self.documents),
            "tokens": self.tokens,
            "edited_copies": round(1 - self.real / max(self.tokens, 1), 4),
            "sha256": digest.hexdigest()[:16],
        }


@dataclass(frozen=True)
class Inputs:
    """The inputs of one run of an experiment.

    folder   for temporary files
    model    a GGUF; None: the demo model
    data     the folder of recorded answers; None: there is none
    text     folders and files of text for datastores; none: installed Python sources
    quick    a first look, in seconds
    tokens   the largest datastore; None: what the experiment can build in its usual time
    tell     gets a line about each finished unit
    """

    folder: Path
    model: Path | None = None
    data: Path | None = None
    text: tuple[Path, ...] = ()
    seed: int = 0
    quick: bool = False
    tokens: int | None = None
    tell: Callable[[str], None] = field(default=lambda line: None, compare=False)

    @property
    def model_path(self) -> Path:
        """The model under test. Raises ModelNotFound."""
        return demo_model() if self.model is None else self.model

    def random(self, *more: int) -> np.random.Generator:
        """A generator that depends on the seed and on `more` only."""
        return np.random.default_rng([self.seed, *more])

    def file(self, name: str) -> Path:
        """A file of the data folder. Raises InputInvalid that names it."""
        if self.data is None:
            raise InputInvalid("recorded answers", name, "no folder of recorded answers was given; give `data`")
        path = self.data / name
        if not path.is_file():
            raise InputInvalid("recorded answers", path, "no such file; `data` names the folder that holds it")
        return path

    def vocabulary(self, answers: str) -> AbstractContextManager[Model]:
        """The vocabulary of a set of ANSWERS: `with inputs.vocabulary(name) as model: model.vocabulary`."""
        return Model.open(self.file(ANSWERS[answers].vocabulary), vocab_only=True)

    def has(self, answers: str) -> bool:
        """Whether the data folder holds the files of a set of ANSWERS."""
        chosen = ANSWERS[answers]
        return self.data is not None and all((self.data / name).is_file() for name in (chosen.file, chosen.vocabulary))

    def answers(self, name: str, vocabulary: Vocabulary, limit: int | None = None) -> list[Recorded]:
        """Recorded answers of a set of ANSWERS, the first `limit`, without those that are too short to count."""
        return counted(load(self.file(ANSWERS[name].file), vocabulary))[:limit]

    def documents(
        self, vocabulary: Vocabulary, tokens: int, suffixes: Sequence[str] = SOURCE, *, copies: bool = True
    ) -> Text:
        """`tokens` tokens of text, the files in an order that the seed decides.

        suffixes: of installed files. Of given folders all text is taken, unless they are other than SOURCE. copies: go
        on with edited copies where the text ends. Without them there may be fewer tokens. Raises CorpusEmpty,
        InputInvalid for a missing folder.
        """
        if self.text:
            filters = Filters() if suffixes == SOURCE else Filters(include=tuple(suffixes))
            parts: list[tuple[Sequence[Path], Filters]] = [(self.text, filters)]
            source = ", ".join(map(str, self.text))
        else:
            parts = _installed(tuple(suffixes))
            source = f"installed sources ({', '.join(suffixes)}) of Python {platform.python_version()}"
        read = chain.from_iterable(self._read(roots, filters) for roots, filters in parts)
        real = list(up_to(_tokenized(read, vocabulary), tokens))
        if not real:
            raise CorpusEmpty(source, "no text")
        total = sum(map(len, real))
        if copies and total < tokens:
            more = edited(real, ends_of_paragraphs(vocabulary), self.random(2))
            return Text(list(up_to(chain(real, more), tokens)), vocabulary.size, total, source)
        return Text(real, vocabulary.size, total, source)

    def _read(self, roots: Sequence[Path], filters: Filters) -> Iterator[str]:
        """The texts below some folders, in an order that the seed decides. Lists the files when it begins."""
        files = [path for path, *_ in list_files(roots, filters)]
        self.random(1).shuffle(files)
        yield from (text.text for text in read_files(files, filters, Skipped()) if text.text)

    def key(self, experiment: str) -> dict[str, Any]:
        """Everything the figures depend on, for the journal. Reads all recorded answers, some megabytes."""
        names = sorted({name for chosen in ANSWERS.values() for name in (chosen.file, chosen.vocabulary)})
        found = {} if self.data is None else {name: self.data / name for name in names}
        return {
            "experiment": experiment,
            "model": _digest(self.model_path, HASHED),
            "data": {name: _digest(path) for name, path in found.items() if path.is_file()},
            "text": {str(path): measure([path]) for path in self.text} or platform.python_version(),
            "seed": self.seed,
            "quick": self.quick,
            "tokens": self.tokens,
        }


def _installed(suffixes: tuple[str, ...]) -> list[tuple[Sequence[Path], Filters]]:
    """Folders and filters of installed text: the well-known modules, the rest of the standard library, packages."""
    library, packages = standard_library(), Path(sysconfig.get_paths()["purelib"])
    known = tuple(library / module for module in well_known_modules() if (library / module).is_file())
    left_out = tuple(f"/{module}" for module in (*held_out_modules(), *well_known_modules()))
    first = [(known, Filters(include=suffixes))] if known and "*.py" in suffixes else []
    return [
        *first,
        ([library], Filters(include=suffixes, exclude=(*LEFT_OUT, "LICENSE*", *left_out))),
        *([([packages], Filters(include=suffixes, exclude=NOT_TEXT))] if packages.is_dir() else []),
    ]


def _tokenized(texts: Iterator[str], vocabulary: Vocabulary) -> Iterator[Int32Array]:
    bulk = vocabulary.bulk() or (lambda texts: [vocabulary.tokenize(text) for text in texts])
    while together := list(islice(texts, TOGETHER)):
        yield from (tokens for tokens in bulk(together) if len(tokens))


def _digest(path: Path, most: int = -1) -> str:
    """Of a file's size and its first `most` bytes. Raises InputInvalid."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(b"%d " % path.stat().st_size + file.read(most)).hexdigest()[:16]
    except OSError as error:
        raise InputInvalid("file", path, error.strerror or str(error)) from error


def by_name(
    inputs: Inputs,
    journal: Journal,
    names: Iterable[str],
    measured: Callable[[str], Any],
    *,
    unit: str = "",
    reasons: tuple[type[RestLocalError], ...] = (InputInvalid,),
) -> tuple[dict[str, Any], dict[str, str]]:
    """What `measured` gives for each name, once, and why other names are left out: `reasons` that it raised.

    `unit`: what the units of the journal begin with.
    """
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if unit + name not in journal:
            try:
                journal.put(unit + name, measured(name))
            except reasons as error:
                left_out[name] = str(error)
                continue
            inputs.tell(f"measured: {name}")
        found[name] = journal[unit + name]
    return found, left_out
