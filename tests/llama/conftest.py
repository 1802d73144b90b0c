"""Fixtures for the tests of the llama room."""

from typing import Any

import pytest

from rest_local import sandbox

RUN = sandbox.run  # before anything replaces it


@pytest.fixture
def real_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start new processes as children, as for a user, in place of forks (`support.forked`)."""
    monkeypatch.setattr(sandbox, "run", RUN)


@pytest.fixture
def children(real_children: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the arguments of each child process that is started."""
    started: list[tuple[Any, ...]] = []
    run = sandbox.run

    def recorded(*arguments: Any) -> Any:
        started.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(sandbox, "run", recorded)
    return started
