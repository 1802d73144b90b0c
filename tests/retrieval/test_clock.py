"""A clock that goes backwards: nothing that changed is missed, and the newest commit stays the newest."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the clock to a time in seconds."""

    def to(seconds: int) -> None:
        class Fixed(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Fixed:
                return cls.fromtimestamp(seconds, tz)

        monkeypatch.setattr(datetime, "datetime", Fixed)
        monkeypatch.setattr(time, "time_ns", lambda: seconds * 10**9)

    return to
