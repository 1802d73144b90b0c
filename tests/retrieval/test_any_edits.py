"""Any sequence of edits, updates, merges and removals gives what a new build of the same files gives."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edited import Bytes, Folder, merge_all, store_documents, texts_in
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracle import every_row
from support.examples import few

from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.sources import from_recipe
from rest_local.retrieval.update import merging, updating
from rest_local.retrieval.update.forgetting import excluding, forget_where
from rest_local.retrieval.update.merging import merge

NAMES = st.sampled_from([f"{folder}{name}.py" for folder in ("", "sub/") for name in "abcd"])
TEXTS = st.text("xyz ", min_size=1, max_size=30)
STORED = st.sampled_from(["stored:1", "stored:2"])


class Edits(RuleBasedStateMachine):
    """The state is a folder with a datastore. `held`: what the datastore must hold, by name."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.folder = Folder(self.directory)
        for name, text in (("kept.py", "kept"), ("a.py", "x y x"), ("b.py", "yy x"), ("sub/c.py", "x y x")):
            self.folder.write(name, text)
        self.folder.build()
        self.held = self.folder.texts()
        self.excluded: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    def files(self) -> dict[str, str]:
        return {name: text for name, text in self.folder.texts().items() if name not in self.excluded}

    @rule(texts=st.dictionaries(NAMES, TEXTS, min_size=1, max_size=5), at_once=st.booleans())
    def write(self, texts: dict[str, str], at_once: bool) -> None:
        for name, text in texts.items():
            self.folder.write(name, text)
        if at_once:
            self.update()

    @rule(name=NAMES)
    def touch(self, name: str) -> None:
        if (self.folder.source / name).exists():
            self.folder.touch(name)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if (self.folder.source / name).exists():
            self.folder.delete(name)

    @rule(old=NAMES, new=NAMES)
    def rename(self, old: str, new: str) -> None:
        if (self.folder.source / old).exists():
            (self.folder.source / new).parent.mkdir(exist_ok=True)
            (self.folder.source / old).rename(self.folder.source / new)

    @rule()
    def update(self) -> None:
        self.folder.update(merging=False)
        stored = {name: text for name, text in self.held.items() if name.startswith("stored:")}
        self.held = self.files() | stored

    @rule(names=st.sets(NAMES, max_size=3))
    def update_only(self, names: set[str]) -> None:
        paths = {str(self.folder.source / name) for name in names}
        self.folder.update(only=paths)
        files = self.files()
        self.held = {name: text for name, text in self.held.items() if name not in paths}
        self.held |= {name: text for name, text in files.items() if name in paths}

    @rule(name=STORED, text=TEXTS)
    def store(self, name: str, text: str) -> None:
        store_documents(self.folder.path, [(name, Bytes().tokenize(text))])
        self.held[name] = text

    @rule(everything=st.booleans())
    def merge(self, everything: bool) -> None:
        (merge_all if everything else merge)(self.folder.path)

    @rule(name=NAMES | STORED, exclude=st.booleans())
    def forget(self, name: str, exclude: bool) -> None:
        is_file = not name.startswith("stored:")
        path = str(self.folder.source / name) if is_file else name

        def same(recipe: Mapping[str, Any], names: object) -> Mapping[str, Any]:
            return recipe

        forgotten = forget_where(self.folder.path, lambda held: held == path, recipe=excluding if exclude else same)
        assert forgotten.names == ((path,) if path in self.held else ())
        text = self.held.pop(path, None)
        same_text = {held for held in self.held if self.held[held] == text and held[0] == "/"}
        assert set(forgotten.copies) == (same_text if is_file else set())
        (walk,) = from_recipe(read_manifest(self.folder.path).recipe)
        self.excluded = {str(self.folder.source / pattern[1:]) for pattern in walk.exclude}  # type: ignore[attr-defined]
        assert not exclude or path in self.excluded or not forgotten.names or not is_file

    @invariant()
    def holds_what_it_must(self) -> None:
        assert texts_in(self.folder.path) == self.held

    @invariant()
    def finds_what_a_new_build_finds(self) -> None:
        rows = lookups(self.folder.path)
        assert rows == expected(self.held)


def lookups(path: Path) -> set[tuple[int, tuple[int, ...]]]:
    """Return (match, continuation) of all rows for a context, as far as they are in the text."""
    with Datastore.open(path) as store:
        found = store.rows(np.frombuffer(b"y x", np.uint8).astype(np.int32), 1000, 4)
        rows = zip(found.match.tolist(), found.continuations.tolist(), strict=True)
        return {(match, tuple(row)) for match, row in rows if match}


def expected(held: Mapping[str, str]) -> set[tuple[int, tuple[int, ...]]]:
    texts = [list(text.encode()) for text in held.values()]
    rows = every_row(texts, list(b"y x"), 4).values()
    return {(match, tuple(row)) for match, row in rows}


@pytest.mark.parametrize("small", [1, 40, 1000])
def test_any_sequence(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "SMALL_SEGMENT", small)
    monkeypatch.setattr(merging, "SMALL_SEGMENT", small)
    run_state_machine_as_test(Edits, settings=settings(few(6), stateful_step_count=25))
