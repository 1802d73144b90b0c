"""The checkout that a command is run in: its datastore, and the question whether to draft from it.

The datastore of a checkout is named after its root, so all commands share it, wherever below the root they are run. The
answer to the question is kept in the user's data directory, by root.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from rest_local.cli import building
from rest_local.cli.messages import fitted, warn
from rest_local.errors import InputInvalid, printable

NAME_LENGTH = 40
YES, NO, NEVER = "yes", "no", "never"
AGAIN_S = 7 * 86_400.0  # after a "no"


@dataclass(frozen=True)
class Code:
    """Text to draft from. root: of the checkout, or the path itself outside of one."""

    root: Path

    @property
    def name(self) -> str:
        """The name of its datastore: legible, and another one for another root."""
        legible = re.sub(r"[^A-Za-z0-9._-]+", "-", self.root.name).strip("-.")[:NAME_LENGTH] or "code"
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        return f"{legible}-{digest}"


def code_of(path: Path) -> Code:
    """The checkout that holds `path`, else the path alone. Raises InputInvalid if there is no such path."""
    path = path.expanduser()
    if not path.exists():
        raise InputInvalid("--code", printable(str(path)), "no such file or directory")
    path = path.resolve()
    return Code(root_of(path) or path)


def root_of(path: Path) -> Path | None:
    """The root of the git checkout (or work tree, or submodule) that holds an absolute path. Runs nothing."""
    return next((folder for folder in (path, *path.parents) if (folder / ".git").exists()), None)


def offered() -> Code | None:
    """The checkout of the working directory, if the user wants it: asked the first time, at a terminal only."""
    if not building.can_ask():
        return None
    try:
        root = root_of(Path.cwd().resolve())
    except OSError:  # the directory is gone, or cannot be read
        return None
    if root is None or root == Path.home().resolve():  # a home directory under git is no project
        return None
    answer = recalled(root)
    if answer is None:
        answer = _ask(root)
        remember(root, answer)
    return Code(root) if answer == YES else None


def _ask(root: Path) -> str:
    question = (
        f"Draft from the code of this checkout ({root})? It is indexed in the background, without secrets and ignored "
        "files, and stays on this machine. [y]es, [n]o, or ne[v]er here"
    )
    choice = click.Choice(["y", "n", "v"], case_sensitive=False)
    answer = click.prompt(
        fitted(printable(question), sys.stderr), type=choice, default="y", show_choices=False, err=True
    )
    return {"y": YES, "n": NO, "v": NEVER}[answer.lower()]


def recalled(root: Path) -> str | None:
    """The answer for a root; None where it was never given, or was a "no" of more than a week ago."""
    entry = _answers().get(str(root))
    answer, asked = (entry.get("answer"), entry.get("asked")) if isinstance(entry, dict) else (None, None)
    if answer not in (YES, NO, NEVER):
        return None
    is_old = not isinstance(asked, (int, float)) or not 0 <= time.time() - asked < AGAIN_S
    return None if answer == NO and is_old else str(answer)


def remember(root: Path, answer: str) -> None:
    """Keep an answer. Where that fails the question comes again."""
    from rest_local.paths import write_atomically

    answers = {**_answers(), str(root): {"answer": answer, "asked": int(time.time())}}
    try:
        write_atomically(_path(), (json.dumps(answers, indent=1) + "\n").encode("ascii"))
    except OSError as error:
        warn(f"the answer is not kept: {error.filename}: {error.strerror}")


def _answers() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):  # a damaged file is as good as none: the question comes again
        found = json.loads(_path().read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _path() -> Path:
    """Raises OSError where the data directory cannot be made."""
    from rest_local.paths import data_dir

    return data_dir() / "checkouts.json"
