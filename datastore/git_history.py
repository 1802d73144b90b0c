"""A datastore of the text that the newest commits of a git checkout wrote, with the surrounding lines.

Each file of each commit is a document, the newest first: `COMMIT:PATH` and the new side of its diff. So drafts can also
come from text that a later commit changed or deleted. Left out are merges, binary files, text that looks like a secret
(as in `rest-local index build`), and file names with quotes or control characters. No program that the repository
configures is run.

python datastore/git_history.py REPOSITORY [--commits N] [-m MODEL] [-o NAME] [--replace]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from rest_local import Model
from rest_local.errors import InputInvalid, RestLocalError
from rest_local.paths import demo_model
from rest_local.retrieval import Built, Skipped, build_from_texts
from rest_local.retrieval.corpus import secret_content, secret_name
from rest_local.retrieval.git import git_command, git_environment

COMMITS = 1000
AROUND = 3  # unchanged lines on each side of a change


def changes(repository: Path, commits: int, skipped: Skipped) -> Iterator[tuple[str, str]]:
    """(`COMMIT:PATH`, text) of each changed file. Raises InputInvalid if git finds no history."""
    command = git_command(
        repository, "-c", "core.quotePath=false", "log", f"--max-count={commits}", "--no-merges", "--no-renames",
        "--no-color", "--no-ext-diff", "--no-textconv", "--patch", f"--unified={AROUND}", "--src-prefix=a/",
        "--dst-prefix=b/", "--format=commit %H", "HEAD", "--",
    )  # fmt: skip
    with TemporaryFile() as errors, _started(command, errors) as git:
        assert git.stdout is not None
        commit, name, lines = "", "", list[str]()
        for raw in git.stdout:
            line = raw.decode("utf-8", "replace")
            if line.startswith(("commit ", "diff --git ")):
                yield from _document(commit, name, lines, skipped)
                name, lines = "", []
                commit = line.split()[1] if line.startswith("commit ") else commit
            elif not name:
                name = line[len("+++ b/") :].rstrip("\n\t") if line.startswith("+++ b/") else ""
            elif line.startswith(("+", " ")):
                lines.append(line[1:])
        yield from _document(commit, name, lines, skipped)
        if git.wait():
            errors.seek(0)
            raise InputInvalid("repository", repository, errors.read().decode("utf-8", "replace").strip())


def _started(command: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=git_environment())
    except FileNotFoundError as error:
        raise RestLocalError("this needs the program git; install it") from error


def _document(commit: str, name: str, lines: list[str], skipped: Skipped) -> Iterator[tuple[str, str]]:
    text = "".join(lines)
    if not text:
        return
    if secret_name(Path(name).name) or secret_content(text.encode()):
        skipped.add("secret", name)
    else:
        yield f"{commit[:10]}:{name}", text


def build(repository: Path, model: Path, name: str, commits: int = COMMITS, replace: bool = False) -> Built:
    """Index the history of HEAD in the vocabulary of `model`."""
    skipped = Skipped()
    recipe = {"kind": "git history", "paths": [str(repository.absolute())], "commits": commits}
    with Model.open(model, vocab_only=True) as opened:
        return build_from_texts(
            name,
            changes(repository, commits, skipped),
            vocabulary=opened.vocabulary,
            recipe={**recipe, "model": str(model.absolute())},
            skipped=skipped,
            replace=replace,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument(
        "--commits", type=int, default=COMMITS, help=f"number of commits, newest first; default: {COMMITS}"
    )
    parser.add_argument("-m", "--model", type=Path, default=demo_model(), help="GGUF whose vocabulary is used")
    parser.add_argument("--replace", action="store_true", help="replace what exists for the model's vocabulary")
    parser.add_argument("-o", "--output", help="name or path; default: the name of the folder and -history")
    args = parser.parse_args()
    name = args.output or f"{args.repository.resolve().name}-history"
    built = build(args.repository, args.model, name, args.commits, args.replace)
    print(f"{built.path}: {built.tokens:,} tokens of {built.documents:,} changes; skipped: {built.skipped.summary()}")


if __name__ == "__main__":
    try:
        main()
    except RestLocalError as error:
        sys.exit(f"error: {error}")
