"""The child process that keeps datastores up to date: what it builds, what it tells, and how it ends."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.toy import demo_model

from rest_local.cli import indexer, opening
from rest_local.cli.indexer import Code, Indexer, Live
from rest_local.decoding.config import EngineConfig
from rest_local.errors import DatastoreCorrupt
from rest_local.llama.model import Model
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path

TEXT = "def quixotic_name(first, second):\n    return first * 17 + second * 23\n"


@pytest.fixture(autouse=True)
def _own_datastores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "datastores"))
    monkeypatch.setattr(indexer, "_shows_at_once", False)
    indexer._news.clear()
    yield
    indexer._news.clear()


@pytest.fixture
def code(tmp_path: Path) -> Code:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(TEXT)
    return Code((tmp_path / "src").resolve())


class Told:
    """Waits for what any of these children tells."""

    def __init__(self, *children: Indexer) -> None:
        self._count = threading.Semaphore(0)
        for child in children:
            child.committed = self._count.release

    def wait(self) -> None:
        assert self._count.acquire(timeout=120)


def documents(name: str) -> list[str]:
    with Datastore.open(datastore_path(name)) as store:
        try:
            store.check()
        except DatastoreCorrupt:
            with Datastore.open(datastore_path(name)) as newer:
                if newer.manifest == store.manifest:
                    raise
            return documents(name)  # a newer commit deleted files of the one that was opened
        return sorted(Path(each).name for each in store.document_names())


def until(true: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    indexer.show_news()
    return capsys.readouterr().err


def test_it_builds_what_is_missing_and_keeps_it_up_to_date(
    code: Code, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets are left out. The child ends by itself, however busy the machine is."""
    monkeypatch.setattr(indexer, "END_S", 120.0)
    (code.root / "keys.py").write_text("token = 'ghp_" + "a" * 36 + "'\n")
    child = Indexer(demo_model(), code=code)
    told = Told(child)
    try:
        told.wait()
        assert documents(code.name) == ["a.py"]
        child.tell_ready()
        assert capsys.readouterr().err == "", "lines wait until they disturb nothing"
        assert "ready: " in shown(capsys)
        (code.root / "b.py").write_text("x = 1\n")
        told.wait()
        assert documents(code.name) == ["a.py", "b.py"]
        assert os.getpriority(os.PRIO_PROCESS, child._child.pid) == 19
    finally:
        child.close()
    child.close()
    assert child._child.returncode == 0
    assert shown(capsys) == ""


def test_an_existing_datastore_is_brought_up_to_date(code: Code) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        build_datastore("mine", [code.root], vocabulary=model.vocabulary)
    (code.root / "while_nobody_watched.py").write_text("x = 1\n")
    child = Indexer(demo_model(), ["mine", "later"])
    told = Told(child)
    try:
        told.wait()
        assert documents("mine") == ["a.py", "while_nobody_watched.py"]
        with Model.open(demo_model(), vocab_only=True) as model:
            build_datastore("later", [code.root], vocabulary=model.vocabulary)
        (code.root / "new.py").write_text("y = 1\n")
        told.wait()
        told.wait()
        assert "new.py" in documents("mine")
        assert "new.py" in documents("later")
    finally:
        child.close()


def test_what_cannot_be_indexed_is_told(code: Code, capsys: pytest.CaptureFixture[str]) -> None:
    (code.root / "a.py").unlink()
    child = Indexer(demo_model(), code=code)
    child._thread.join(120)
    child.close()
    assert "no text to index" in shown(capsys)


def test_a_child_that_dies_is_told(code: Code, capsys: pytest.CaptureFixture[str]) -> None:
    child = Indexer(demo_model(), code=code)
    Told(child).wait()
    os.kill(child._child.pid, signal.SIGKILL)
    child._thread.join(120)
    assert "not kept up to date any more" in shown(capsys)
    child.close()
    assert documents(code.name) == ["a.py"]


def test_it_ends_with_a_parent_that_is_killed(code: Code, tmp_path: Path) -> None:
    """Only the pipe tells it."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rest_local.cli.indexer import Code\n"
        "from rest_local.cli.indexer import Indexer\n"
        "child = Indexer(Path(sys.argv[2]), code=Code(Path(sys.argv[1])))\n"
        "print(child._child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(code.root), str(demo_model())]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    descriptor = os.pidfd_open(pid)  # also tells when a process ends that is no child of this one
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended, _, _ = select.select([descriptor], [], [], 120)
    os.close(descriptor)
    assert ended


def test_two_children_of_one_checkout_share_its_datastore(code: Code) -> None:
    for number in range(10):
        (code.root / f"{number}.py").write_text(f"{TEXT}# {number}\n" * 50)
    children = [Indexer(demo_model(), code=code) for _ in range(2)]
    told = Told(*children)
    try:
        told.wait()
        (code.root / "new.py").write_text("x = 1\n")
        until(lambda: len(documents(code.name)) == 12)
    finally:
        for child in children:
            child.close()


def test_an_engine_uses_the_code_when_it_is_ready(code: Code) -> None:
    with opening.open_engine(EngineConfig(model=demo_model(), n_ctx=256), Live(code)) as engine:
        used = threading.Event()
        engine.datastores.on_change = used.set
        assert engine.datastores.in_use or engine.datastores.has_news or used.wait(120)
        list(engine.generate("x", max_tokens=2))
        assert [store.path.name for store in engine.datastores.in_use] == [code.name]
    with opening.open_engine(EngineConfig(model=demo_model(), n_ctx=256, policy="off"), Live(code)) as engine:
        assert engine.datastores.in_use == []


def test_a_watched_datastore_may_come_later(code: Code, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=demo_model(), n_ctx=256, datastores=("not-there-yet",))
    with opening.open_engine(config, Live(watch=True)) as engine:
        assert "not-there-yet is used as soon as it is built" in capsys.readouterr().err
        used = threading.Event()
        engine.datastores.on_change = used.set
        build_datastore("not-there-yet", [code.root], vocabulary=engine.model.vocabulary)
        assert engine.datastores.has_news or used.wait(120)
