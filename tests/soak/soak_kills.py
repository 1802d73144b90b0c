"""Thousands of kills of everything that changes a datastore: nothing that was committed is lost, nothing comes back.

Not collected by `make test`; `make soak` runs it. REST_LOCAL_SOAK_KILLS is the number of kills, 10 000 without
it, which take about a quarter of an hour on two cores. REST_LOCAL_SOAK_SEED is the seed of the first run.

A model in this process says what each change makes of the texts. A forked child makes the change and ends by SIGKILL
before a random file operation, or after a random time. Then the datastore must be intact and hold what the model says
for the commit before the change or after it. Sometimes two children change it at once, in either order.
"""

import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "retrieval"))
os.environ["OMP_NUM_THREADS"] = (
    "1"  # a child that is forked waits for ever for threads of OpenMP, which it does not have
)

import pytest
from changes import left_over, set_small
from edited import Bytes, Folder, merge_all, text_on_disk, texts_in
from failpoints import Named

from rest_local.errors import DatastoreLocked
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.sources import from_recipe
from rest_local.retrieval.update import watching
from rest_local.retrieval.update.forgetting import forget
from rest_local.retrieval.update.updating import roots_of, update

KILLS = int(os.environ.get("REST_LOCAL_SOAK_KILLS", "10000"))
SEED = int(os.environ.get("REST_LOCAL_SOAK_SEED", "1"))
CHAINS = 2  # processes, each with a datastore of its own
DELAY_S = 0.03  # the longest before a kill that is not at a step
KNOWN = Bytes()
IDENTITY = VocabularyId(KNOWN.hash, KNOWN.size, KNOWN.name)


class State(NamedTuple):
    """What a commit holds: texts by name, and the folders that an update reads again."""

    texts: frozenset[tuple[str, str]]
    roots: frozenset[str]


class Change(NamedTuple):
    """A change, and what it makes of a state."""

    what: str
    work: Callable[[Path, Files], object]
    model: Callable[[State], State]


def files_below(roots: frozenset[str]) -> dict[str, str]:
    found = (file for root in roots for file in Path(root).rglob("*.py"))
    return {str(file): file.read_text() for file in found}


def state_of(path: Path) -> State:
    """Return the state of the newest commit. Fail if a file of it is damaged."""
    texts = texts_in(path)
    return State(frozenset(texts.items()), frozenset(roots_of(from_recipe(read_manifest(path).recipe))))


def with_texts(state: State, texts: dict[str, str], gone: Callable[[str], bool] = lambda name: False) -> State:
    kept = {name: text for name, text in state.texts if not gone(name)}
    return state._replace(texts=frozenset({**kept, **texts}.items()))


class Chain:
    """One datastore, and everything that is done to it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.draw, self.number = random.Random(seed), 0
        self.folder = Folder(directory)
        self.path = self.folder.path
        self.other = directory / "other"
        self.other.mkdir()
        self.counts: Counter[str] = Counter()
        for _ in range(10):
            self.edit(self.folder.source)
            self.edit(self.other)
        self.run(self.build(), Files())
        self.state = state_of(self.path)

    def text(self) -> str:
        """Return a new text, which never was in the datastore before."""
        self.number += 1
        return f"text {self.number} " * self.draw.randrange(1, 12)

    def edit(self, source: Path) -> None:
        """Write and delete a few files."""
        for _ in range(self.draw.randrange(1, 4)):
            file = source / f"{self.draw.randrange(12)}.py"
            if self.draw.random() < 0.2:
                file.unlink(missing_ok=True)
            else:
                file.write_text(self.text())
                self.folder.clock += 10
                os.utime(file, (self.folder.clock, self.folder.clock))
        (source / "always.py").write_text("always")

    # The changes

    def build(self) -> Change:
        roots = [str(self.folder.source), str(self.other)]
        new = State(frozenset(files_below(frozenset(roots)).items()), frozenset(roots))
        return Change(
            "build", lambda path, files: build_datastore(path, roots, vocabulary=KNOWN, files=files), lambda _: new
        )

    def update(self) -> Change:
        merging = self.draw.random() < 0.5

        def model(state: State) -> State:
            below = tuple(os.path.join(root, "") for root in state.roots)
            return with_texts(state, files_below(state.roots), lambda name: name.startswith(below))

        return Change("update", lambda path, files: update(path, vocabulary=KNOWN, merging=merging, files=files), model)

    def forget(self) -> Change:
        held = sorted(name for name, _ in self.state.texts if not name.endswith("always.py"))
        names = set(self.draw.sample(held, min(len(held), 2)))
        return Change(
            "forget",
            lambda path, files: forget(path, names, files=files),
            lambda state: with_texts(state, {}, names.__contains__),
        )

    def merge(self) -> Change:
        return Change("merge", lambda path, files: merge_all(path, files=files), lambda state: state)

    def watch(self) -> Change:
        """Return a watch that sees one event, and ends: a full update."""
        model = self.update().model

        def work(path: Path, files: Files) -> None:
            stop = threading.Event()

            def events(roots: object, ended: threading.Event) -> Iterator[list[tuple[int, str]]]:
                yield []
                stop.set()

            target = watching.Target("store", path, KNOWN)
            watching.Watcher([target], partial(update, files=files), events=events).run(stop)  # type: ignore[arg-type]

        return Change("watch", work, model)

    def any(self) -> Change:
        """Return any change."""
        often = [self.update, self.forget, self.merge, self.watch]
        return self.draw.choice([*often, *often, self.build])()

    # Doing them

    def run(self, change: Change, files: Files) -> None:
        change.work(self.path, files)

    def forked(self, change: Change, files: Files) -> int:
        """Fork a child that makes a change, and return its id."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            self.run(change, files)
            code = 0
        except DatastoreLocked:
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def killed(self, change: Change) -> Files:
        """Return files that end the process at a step of the change, or after it."""
        at = self.draw.randrange(1, self.measured(change) + 2)

        def die(step: int, name: str) -> None:
            if step == at:
                os.kill(os.getpid(), signal.SIGKILL)

        return Named(die)

    def turn(self) -> int:
        """Make one or two changes that are killed or not. Return the number of kills."""
        self.edit(self.folder.source if self.draw.random() < 0.7 else self.other)
        mode = self.draw.random()
        if mode < 0.15:
            changes = [self.any(), self.any()]
        else:
            changes = [self.any()]
        files = [self.killed(change) if mode < 0.8 else Files() for change in changes]
        children = [self.forked(change, one) for change, one in zip(changes, files, strict=True)]
        if mode >= 0.8:
            time.sleep(self.draw.random() * DELAY_S)
            os.kill(children[0], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 2, -signal.SIGKILL}, (changes, codes)
        self.check(changes, codes)
        for change, code in zip(changes, codes, strict=True):
            self.counts[f"{change.what}{'' if code == -signal.SIGKILL else ', not killed'}"] += 1
        return codes.count(-signal.SIGKILL)

    def measured(self, change: Change) -> int:
        """Count the file operations of a change, which is made in a copy."""
        copy, files = self.path.with_name("copy"), Named()
        shutil.copytree(self.path, copy)
        change.work(copy, files)
        shutil.rmtree(copy)
        return files.steps

    def check(self, changes: list[Change], codes: list[int]) -> None:
        """Check that, whatever was killed, the commit there is one that the changes can have made."""
        done = [change for change, code in zip(changes, codes, strict=True) if code == 0]
        allowed = [state for state, made in self.outcomes(changes) if all(change in made for change in done)]
        before, self.state = self.state, state_of(self.path)
        assert self.state in allowed, (changes, codes, before.texts ^ self.state.texts)

    def outcomes(self, changes: list[Change]) -> list[tuple[State, list[Change]]]:
        """Return the states that some of the changes give in some order, each with these changes."""
        first, found = self.state, [(self.state, list[Change]())]
        for order in (changes, changes[::-1]):
            found += [(change.model(first), [change]) for change in order]
            state = first
            for change in order:
                state = change.model(state)
            found.append((state, order))
        return found

    def go_on(self) -> None:
        """Check that a change succeeds if it is not killed, and that the next commit deletes what was left over."""
        change = self.any()
        self.run(change, Files())
        self.check([change], [0])
        for last in (self.update, self.update):
            change = last()
            self.run(change, Files())
            self.check([change], [0])
        assert left_over(self.path) == set()
        assert list(self.path.parent.glob(".*")) == []
        self.forget_everything_old()

    def forget_everything_old(self) -> None:
        """Check that after `forget` no file of the index has a text that is in no commit any more."""
        change = self.forget()
        self.run(change, Files())
        self.check([change], [0])
        assert left_over(self.path) == set()
        held = {number for _, text in self.state.texts for number in re.findall(r"text (\d+)", text)}
        assert {number for text in text_on_disk(self.path) for number in re.findall(r"text (\d+)", text)} <= held


def chain(directory: Path, seed: int, kills: int) -> None:
    run, killed, turns, began = Chain(directory, seed), 0, 0, time.monotonic()
    while killed < kills:
        killed += run.turn()
        turns += 1
        if turns % 5 == 0:
            run.go_on()
        if turns % 500 == 0:
            print(f"seed {seed}: {killed} killed in {time.monotonic() - began:.0f} s", flush=True)
    print(f"seed {seed}: {killed} killed, 0 commits lost, {time.monotonic() - began:.0f} s;", end=" ")
    print(", ".join(f"{what}: {count}" for what, count in sorted(run.counts.items())), flush=True)


def test_every_change_killed_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_small(monkeypatch.setattr)
    children = []
    for number in range(CHAINS):
        child = os.fork()
        if not child:
            code = 1
            try:
                chain(tmp_path / str(number), SEED + number, KILLS // CHAINS)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * CHAINS
