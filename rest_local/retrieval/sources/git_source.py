"""The tracked files of a revision of a git repository, without a checkout, and what its newest commits wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.corpus import MAX_FILE_SIZE, Filters
from rest_local.retrieval.sources.git import output_of
from rest_local.retrieval.sources.git_history import changes
from rest_local.retrieval.sources.git_tree import files_of_commit, measure_tree
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import absolute

COMMITS = 1000
_SHORT = 12


@dataclass(frozen=True, slots=True)
class Git(Source):
    """A revision of a repository, which may be bare.

    revision: as given, such as a branch; commit: what it meant when the source was prepared. history: also the text
    that the newest `commits` commits wrote. The other fields are those of `corpus.Filters`.

    The files are named `REPOSITORY@REVISION:PATH`, so that an update after the branch moved knows them again; those of
    the history `REPOSITORY@COMMIT:PATH` with 12 digits, and files too if the revision is a commit's id.
    """

    kind: ClassVar[str] = "git"
    repository: str
    revision: str = "HEAD"
    commit: str = ""
    history: bool = False
    commits: int = COMMITS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_secrets: bool = False
    max_file_size: int = MAX_FILE_SIZE

    def __post_init__(self) -> None:
        self.filters()
        if self.commits < 1:
            raise OptionError(f"commits {self.commits}: must be at least 1")
        if self.revision.startswith("-") or self.commit.startswith("-") or not self.revision:
            raise OptionError(f"revision {self.revision!r}: give a branch, a tag or a commit")

    def filters(self) -> Filters:
        return Filters(self.include, self.exclude, self.allow_secrets, self.max_file_size)

    def texts(self, reading: Reading) -> Iterator[Text]:
        repository, commit = Path(self.repository), self._commit()
        return self._texts(repository, commit, reading)

    def _texts(self, repository: Path, commit: str, reading: Reading) -> Iterator[Text]:
        fixed = commit.startswith(self.revision) and len(self.revision) >= _SHORT
        name = f"{repository}@{commit[:_SHORT] if fixed else self.revision}"
        yield from files_of_commit(repository, commit, name, self.filters(), reading)
        if self.history:
            yield from changes(repository, commit, self.commits, self.filters(), reading)

    def measure(self) -> tuple[int, int]:
        """Without the history, whose size is not known before it was read."""
        return measure_tree(Path(self.repository), self._commit(), self.filters())

    def about(self) -> str:
        return f"{self.repository}@{self.revision}{' with its history' if self.history else ''}"

    def prepared(self) -> Git:
        source = replace(self, repository=absolute(self.repository), commit="")
        return replace(source, commit=source._commit())

    def _commit(self) -> str:
        """The id of the recorded commit, else of the one that the revision means now. Raises InputInvalid."""
        if not os.path.isdir(self.repository):
            raise InputInvalid("repository", printable(self.repository), "no such directory; clone it first")
        wanted = self.commit or self.revision
        question = ("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}")
        answer, _ = output_of(Path(self.repository), *question)
        if answer:
            return answer
        _, problem = output_of(Path(self.repository), "rev-parse", "--git-dir")
        cause = problem.removeprefix("fatal: ") or f"no revision {wanted!r}"
        raise InputInvalid("repository", printable(self.repository), cause)
