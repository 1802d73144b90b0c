"""Live servers: one with the demo model for the whole session, others with a scripted service."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from fake_service import scripted_server
from live import Live, served
from support.toy import demo_model

from rest_local.decoding.engine import Engine
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings


@pytest.fixture(scope="session")
def demo() -> Iterator[Live]:
    """Serve the demo model with four slots and everything on."""
    settings = ServerSettings(port=0, metrics=True, aliases=("coder",))
    serving = Serving(settings, "demo", lambda: Engine.load(demo_model(), slots=4), drain_seconds=5)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


@pytest.fixture
def scripted() -> Iterator[Callable[..., Live]]:
    """Return `scripted(keys=(b"k",), room=2, answer=None)`, which starts servers for this test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(scripted_server(**options))


@pytest.fixture(scope="session")
def shared() -> Iterator[Live]:
    """Yield a server for the tests that leave it as it is. Each browser's page keeps its own conversations."""
    with scripted_server() as live:
        yield live


@pytest.fixture
def hello(shared: Live) -> Live:
    """Return a server that answers everything with "Hello world"."""
    shared.service.forget(("Hello", " world"))
    return shared


@pytest.fixture
def quiet(shared: Live) -> Live:
    """Return a server whose answers the test gives, piece by piece."""
    shared.service.forget(None)
    return shared
