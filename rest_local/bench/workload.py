"""The workload of a replay: the answers under test, the earlier answers, and the datastores.

Files, repositories and names go in, a `Workload` comes out; close it, or use `with`. Every call of `sources` returns
new sources over the same datastores and the same earlier answers, which no replay changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rest_local.bench.edits import EDITS, load_edits
from rest_local.bench.recorded import Recorded, load
from rest_local.drafting.sources import Sources
from rest_local.errors import InputInvalid, OptionError
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.home import datastore_path


@dataclass
class Workload:
    """The data of a replay. `earlier`: answers that serve as the model's history; None without a history."""

    tested: list[Recorded]
    earlier: list[list[int]] | None
    n_vocab: int
    stores: list[Datastore] = field(default_factory=list)
    _history: GrowingText | None = None

    def sources(self) -> Sources:
        """New sources over the datastores and the history."""
        if self.earlier is not None and self._history is None:
            self._history = GrowingText()
            for answer in self.earlier:
                self._history.extend([*answer, -1])
        return Sources(self.stores, self.n_vocab, self._history)

    @property
    def tokens(self) -> int:
        return sum(len(answer.answer) for answer in self.tested)

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
) -> Workload:
    """Open files and datastores. `history`: "N" or "N:" tests the first N answers with the others as history; anything
    else is a file of earlier answers. `limit`: the most answers to test. Raises OptionError, InputInvalid,
    DatastoreError, OSError.
    """
    recorded = [answer for path in files for answer in load(path, vocabulary)]
    for repository in repositories:
        recorded += load_edits(repository, vocabulary, edits, predict=predict)
    if not recorded:
        raise OptionError("nothing to replay: name a file of recorded answers, or a repository with --git")
    tested, earlier = _split(recorded, history, vocabulary)
    workload = Workload(tested[:limit], earlier, vocabulary.size)
    identity = vocabulary.identity
    try:
        for name in datastores:
            path = datastore_path(name)
            opened = Datastore.open(path, vocabulary_hash=identity.hash, vocabulary_name=identity.name)
            workload.stores.append(opened)
    except BaseException:
        workload.close()
        raise
    return workload


def _split(
    recorded: list[Recorded], history: str | None, vocabulary: Vocabulary
) -> tuple[list[Recorded], list[list[int]] | None]:
    if history is None:
        return recorded, None
    number = history.removesuffix(":")
    if not number.isascii() or not number.isdigit():
        try:
            return recorded, [answer.answer for answer in load(Path(history), vocabulary)]
        except OSError as error:
            cause = f"neither a number of answers nor a file of them: {error.strerror or error}"
            raise InputInvalid("--history", history, cause) from error
    n = int(number)
    if not 0 < n < len(recorded):
        raise OptionError(f"--history {history}: there are {len(recorded)} answers; test 1 to {len(recorded) - 1}")
    return recorded[:n], [answer.answer for answer in recorded[n:]]
