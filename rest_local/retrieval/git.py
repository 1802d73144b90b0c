"""How git is asked about a repository of somebody else's: so that nothing runs that its configuration names.

A checkout can name programs for git to run: a file system monitor, a program that checks signatures of commits where
the log shows them, the other end of a partial clone whose missing blobs git fetches when they are read.
"""

from __future__ import annotations

import os
from pathlib import Path

_HARMLESS = ("core.fsmonitor=false", "log.showSignature=false", "protocol.allow=never")


def git_command(repository: Path, *arguments: str) -> list[str]:
    """The command line; run it with `git_environment`."""
    settings = [part for setting in _HARMLESS for part in ("-c", setting)]
    return ["git", "-C", str(repository), *settings, *arguments]


def git_environment() -> dict[str, str]:
    """This process's, in which git fetches nothing (git 2.45 and later; earlier ones heed `protocol.allow`)."""
    return {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
