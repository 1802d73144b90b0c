"""The child process that keeps datastores up to date: what it builds, what it tells, and how it ends."""

import json
import os
import select
import shutil
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


Watching = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def watching(code: Code) -> Iterator[Watching]:
    """Run `rest-local index watch mine`, once it watches."""
    with Model.open(demo_model(), vocab_only=True) as model:
        build_datastore("mine", [code.root], vocabulary=model.vocabulary, recipe={"model": str(demo_model())})
    made: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rest_local", "index", "watch", "mine", *options]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        made.append(child)
        assert child.stderr is not None
        line = child.stderr.readline()
        assert line.startswith("watching"), line
        return child

    yield start
    for child in made:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("number", "code_"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_watch_ends_as_it_should(number: int, code_: int, code: Code, watching: Watching) -> None:
    child = watching("--json")
    assert child.stdout is not None
    (code.root / "b.py").write_text("x = 1\n")
    line = json.loads(child.stdout.readline())
    assert (line["name"], line["added"], line["documents"]) == ("mine", 1, 2)
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (code_, "")


def test_a_killed_watch_leaves_a_good_datastore(code: Code, watching: Watching) -> None:
    """It is killed at some moment of an update. `test_build` and others kill at every step of the commit."""
    child = watching("--json")
    assert child.stdout is not None
    (code.root / "0.py").write_text(f"{TEXT}# 0\n")
    child.stdout.readline()
    (code.root / "1.py").write_text(f"{TEXT}# 1\n")
    child.kill()
    child.communicate()
    assert "a.py" in documents("mine")
    again = watching("--json")
    assert again.stdout is not None
    (code.root / "last.py").write_text("x = 1\n")
    until(lambda: len(documents("mine")) == 4)


def test_commits_are_lines_on_stderr_and_a_watch_ends_with_the_datastore(code: Code, watching: Watching) -> None:
    child = watching()
    assert child.stderr is not None
    (code.root / "a.py").write_text("other = 1\n")
    assert "mine: 1 changed; " in child.stderr.readline()
    shutil.rmtree(datastore_path("mine"))
    (code.root / "b.py").write_text("x = 1\n")
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "no longer watched" in errors


def test_an_index_whose_model_is_gone_goes_stale(code: Code, call: Callable[..., object]) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        build_datastore("mine", [code.root], vocabulary=model.vocabulary, recipe={"model": "/gone/model.gguf"})
    done = call("index", "watch", "mine")
    assert done.code == 1  # type: ignore[attr-defined]
    assert "goes stale: the model it was built with is gone (/gone/model.gguf)" in done.err  # type: ignore[attr-defined]
    assert "nothing to watch" in done.err  # type: ignore[attr-defined]
    missing = call("index", "watch", "none-such")
    assert (missing.code, "not found" in missing.err) == (1, True)  # type: ignore[attr-defined]
