"""A git repository for tests."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


class Repository:
    """A new repository at `path`, whose commits need no configuration of the user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(self.path), *identity, *arguments], check=True, capture_output=True)

    def commit(self, message: str, files: Mapping[str, str | bytes]) -> None:
        """Write the files and commit all changes of the folder."""
        for name, content in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
