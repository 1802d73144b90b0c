"""An export is imported as it was, or refused before anything is visible."""

import errno
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from failpoints import Named, fail_at, kills, put_tree
from stores import NEW, OLD, OTHER, VOCABULARY, content_of, make, walked
from support.files import files_up_to
from test_build import names, orphans
from test_checking import faults, put, sign
from test_datastore import rewrite

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreExists,
    DatastoreLocked,
    DatastoreUnwritable,
    OptionError,
)
from rest_local.retrieval import Datastore, VocabularyId, list_datastores
from rest_local.retrieval.building import build as building
from rest_local.retrieval.building.build import build
from rest_local.retrieval.documents import Document, FileState
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import MANIFEST, sealed
from rest_local.retrieval.home import indexes, read_manifest
from rest_local.retrieval.maintenance import moving
from rest_local.retrieval.maintenance.moving import HEAD, TAIL, export, export_file, import_datastore

MORE = {"more.py": [1, 2, 3]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A datastore of NEW for VOCABULARY, and of OLD for OTHER. Names lie in `tmp_path`/home."""
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    path = tmp_path / "store"
    documents = [
        Document(name, np.array(tokens, np.int32), (FileState(name, 1, 2, b"s" * 32),)) for name, tokens in NEW.items()
    ]
    build(
        path,
        documents,
        vocabulary=VOCABULARY,
        recipe={**walked("/src"), "model": "/m"},
        segment_tokens=12,
    )
    return make(path, OLD, vocabulary=OTHER)


def exported(path: Path, **options: object) -> bytes:
    output = io.BytesIO()
    moved = export(path, indexes(path), output, **options)  # type: ignore[arg-type]
    assert moved.bytes == len(output.getvalue())
    return output.getvalue()


def imported(data: bytes, name: str | Path | None = None, **options: object) -> Path:
    return import_datastore(io.BytesIO(data), name, **options).path  # type: ignore[arg-type]


def held(path: Path) -> dict[str, dict[str, list[int]]]:
    """The content of each index by the name of its vocabulary."""
    return {read_manifest(directory).vocabulary.name: content_of(directory) for directory in indexes(path)}


BOTH = {"toy": NEW, "other": OLD}


def test_what_is_exported_is_imported(store, tmp_path):
    path = imported(exported(store))
    assert path == tmp_path / "home" / "store"
    assert held(path) == BOTH
    assert list_datastores() == ["store"]
    assert names(tmp_path / "home") == {"store"}
    assert faults(path, thorough=True) == []
    for before, after in zip(map(read_manifest, indexes(store)), map(read_manifest, indexes(path)), strict=True):
        assert (after.vocabulary, after.recipe, after.created) == (before.vocabulary, before.recipe, before.created)
        assert [entry.tokens for entry in after.segments] == [entry.tokens for entry in before.segments]
        assert {entry.name for entry in after.segments}.isdisjoint(entry.name for entry in before.segments)
    with Datastore.open(path) as copy:
        assert copy.documents(0)[0].states[0].sha256 == b"s" * 32
    assert {file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


def test_one_vocabulary_alone_gets_the_datastores_own_directory(store, tmp_path):
    output = io.BytesIO()
    export(store, [indexes(store)[1]], output)
    path = imported(output.getvalue(), "other")
    assert indexes(path) == [path]
    assert held(path) == {"other": OLD}


def test_without_its_recipe_no_path_is_told(store):
    data = exported(store, recipe=False)
    assert b"/src" not in data
    moved = import_datastore(io.BytesIO(data))
    assert read_manifest(moved.path).recipe == {}
    assert [each.recipe for each in import_datastore(io.BytesIO(exported(store)), "other").manifests] == [
        {**walked("/src"), "model": "/m"},
        walked("src"),
    ]


def test_an_existing_name_is_refused_and_replaced_only_when_asked(store, tmp_path):
    data = exported(store)
    path = make(tmp_path / "home" / "store", MORE)
    make(path, MORE, vocabulary=VocabularyId("ee" * 32, 1000, "third"))
    before = held(path)
    with pytest.raises(DatastoreExists, match="`replace`"):
        imported(data)
    assert held(path) == before
    moved = import_datastore(io.BytesIO(data), replace=True)
    assert moved.also == ("third",)
    assert held(path) == {**BOTH, "third": MORE}
    assert orphans(path) == set()
    imported(data, replace=True)  # over itself
    assert held(path) == {**BOTH, "third": MORE}
    assert names(path.parent) == {"store"}
    assert faults(path) == []


def test_names_and_places_that_are_none(store, tmp_path):
    data = exported(store)
    for name in ("", ".", ".."):
        with pytest.raises(OptionError):
            imported(data, name)
    (tmp_path / "file").touch()
    with pytest.raises(DatastoreUnwritable):
        imported(data, tmp_path / "file" / "below")
    with pytest.raises(DatastoreError):
        imported(data, tmp_path / "file")
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(DatastoreUnwritable, match="not a datastore"):
        imported(data, foreign)
    assert names(tmp_path) == {"file", "store", "thesis"}


def refused(data: bytes, home: Path, match: str | None = None) -> None:
    with pytest.raises(DatastoreError, match=match):
        imported(data, "copy")
    assert not home.exists() or names(home) == set()


class Nowhere(Files):
    """Takes everything and keeps nothing: for thousands of reads."""

    def make_directory(self, path: Path) -> None:
        pass

    def create(self, path: Path) -> int:
        return os.open(os.devnull, os.O_WRONLY)

    def sync(self, descriptor: int) -> None:
        pass


def read(data: bytes) -> None:
    """All that an import does before it compares the checksums of the files."""
    reader = moving.Reader(io.BytesIO(data), "test")
    for where, size in reader.head()[1]:
        moving._receive(reader, Path("nowhere"), where, size, Nowhere())
    reader.end()


def places(data: bytes) -> list[int]:
    """Every byte, of runs of zeros every 16th."""
    return [at for at, byte in enumerate(data) if byte or at % 16 == 0]


def test_cut_at_every_byte(store, tmp_path):
    data = exported(make(tmp_path / "small", {"a": [1, 2]}))
    for size in places(data):
        with pytest.raises(DatastoreError):
            read(data[:size])
    for size in range(0, len(data), 400):
        refused(data[:size], tmp_path / "home")
    read(data)
    assert content_of(imported(data)) == {"a": [1, 2]}


def test_every_flipped_bit(store, tmp_path):
    data = exported(make(tmp_path / "small", {"a": [1, 2]}))
    for at in places(data):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(DatastoreError):
            read(bytes(changed))
        if at % 400 == 0:
            refused(bytes(changed), tmp_path / "home")


def test_what_is_appended_or_is_no_export(store, tmp_path):
    data, home = exported(store), tmp_path / "home"
    refused(data + b"\0", home, "does not end")
    refused(b"", home, "no datastore")
    refused(b"PK\3\4" + data, home, "no datastore")
    refused(data.replace(b"rest-local-export-1", b"rest-local-export-2", 1), home, "another format")


def forged(data: bytes, change: Callable[[dict[str, bytes]], None], names_of: Callable[[str], str] = str) -> bytes:
    """An export with other content, headers and checksum, as a hostile sender writes one."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        parts = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    del parts[TAIL]
    change(parts)
    output = io.BytesIO()
    writer = moving.Writer(output)
    for name, content in parts.items():
        writer.add(names_of(name), content)
    writer.end()
    return output.getvalue()


def resealed(data: bytes, **fields: object) -> bytes:
    held = json.loads(data)
    del held["sha256"]
    return sealed({**held, **fields})


def test_a_forged_head(store, tmp_path):
    data, home = exported(store), tmp_path / "home"
    size = len(forged(data, lambda parts: None))
    assert size == len(data)
    fields = json.loads(data[512 : 512 + data[512:].index(b"\0")])
    for change in (
        {"name": "../x"},
        {"name": "/etc/x"},
        {"name": ".hidden"},
        {"name": ""},
        {"name": 5},
        {"name": "\ud800"},
        {"magic": "x"},
        {"format": 2},
        {"indexes": []},
        {"indexes": 5},
        {"indexes": [{"folder": "../x", "manifest": 5}]},
        {"indexes": [{"folder": "", "manifest": 1 << 62}]},
        {"indexes": [{"folder": "", "manifest": -1}]},
        {"indexes": [fields["indexes"][0]] * 2},
        {"indexes": [*fields["indexes"], fields["indexes"][1]]},
        {"indexes": [fields["indexes"][0], {**fields["indexes"][1], "folder": "vocabulary-" + "0" * 16}]},
    ):
        refused(forged(data, lambda parts, change=change: parts.update({HEAD: resealed(parts[HEAD], **change)})), home)
    for broken in (b"{", b"[" * 5000, b'{"a": ' + b"9" * 5000 + b"}"):
        refused(forged(data, lambda parts, broken=broken: parts.update({HEAD: broken})), home, "head is damaged")


def test_links_devices_and_other_paths_have_no_place(store, tmp_path):
    data, home = exported(store), tmp_path / "home"
    header = data.index(b"datastore/manifest.json")
    for kind in b"123456LxgS":
        info = tarfile.TarInfo.frombuf(data[header : header + 512], "ascii", "strict")
        info.type, info.linkname = bytes([kind]), "/etc/passwd"
        block = info.tobuf(tarfile.GNU_FORMAT)[-512:]
        refused(data[:header] + block + data[header + 512 :], home, "not where it has to be")
    for name in ("../manifest.json", "/etc/manifest.json", "datastore/../manifest.json"):
        changed = forged(data, lambda parts: None, lambda old, name=name: name if old.endswith(MANIFEST) else old)
        refused(changed, home, "not where it has to be")


def test_a_forged_manifest(store, tmp_path):
    home = tmp_path / "home"
    good = make(tmp_path / "good", NEW)

    def manifest(change: Callable[[dict], None]) -> bytes:
        path = tmp_path / "forged"
        shutil.copytree(good, path)
        rewrite(path, change)
        content = (path / MANIFEST).read_bytes()
        shutil.rmtree(path)

        def put_in(parts):
            parts["datastore/manifest.json"] = content
            parts[HEAD] = resealed(parts[HEAD], indexes=[{"folder": "", "manifest": len(content)}])

        return forged(exported(good), put_in)

    assert imported(manifest(lambda fields: None), tmp_path / "same")
    changes = (
        lambda fields: fields["vocabulary"].update(hash="../../../x"),
        lambda fields: fields["vocabulary"].update(hash="x" * 64),
        lambda fields: fields["segments"][0].update(name="../../etc/x"),
        lambda fields: fields["segments"].append(fields["segments"][0]),
        lambda fields: fields["segments"][0]["files"]["documents"].update(size=1 << 61),
        lambda fields: fields["segments"][0]["files"]["documents"].update(sha256="0" * 64),
        lambda fields: fields["recipe"].update(model=5),
    )
    for change in changes:
        refused(manifest(change), home)


@pytest.mark.parametrize("kind", ["tokens", "order", "documents", "states", "sample"])
def test_rightly_hashed_damage_is_refused_or_harmless(tmp_path, kind, monkeypatch):
    """Random bytes in a file, with checksums that fit. What is imported is searched without a crash and without an id
    that the vocabulary does not have.
    """
    monkeypatch.setattr(building, "SAMPLED", 1)
    draw = random.Random(kind)
    documents = [
        Document(name, np.array(tokens * 20, np.int32), (FileState(name, 1, 2, b"s" * 32),))
        for name, tokens in NEW.items()
    ]
    good, refusals = tmp_path / "good", 0
    build(good, documents, vocabulary=VOCABULARY)
    for number in range(25):
        path = shutil.copytree(good, tmp_path / "bad")
        size = next(path.glob(f"*.{kind}.bin")).stat().st_size
        width, value = draw.choice(((1, draw.randrange(256)), (4, 2**32 - 1), (8, 2**63), (8, 0), (2, 1000)))
        sign(path, kind, put(draw.randrange(max(size - width, 1)), value.to_bytes(width, "big")))
        data = exported(path)
        shutil.rmtree(path)
        try:
            there = imported(data, tmp_path / f"store-{number}")
        except DatastoreError:
            refusals += 1
            continue
        with Datastore.open(there) as store:
            for context in ([9, 9, 2], [1, 2, 3], [8], [999], [2, 6, 9]):
                rows = store.rows(np.array(context, np.int32), 8, 8)
                assert rows.continuations.max(initial=-1) < VOCABULARY.size
                store.find(np.array(context, np.int32))
            for name in store.document_names():
                assert isinstance(name, str)
        shutil.rmtree(there)
    assert names(tmp_path) == {"good"}
    assert refusals or kind == "sample"


def test_two_indexes_of_one_vocabulary_are_refused(store, tmp_path):
    (folder,) = store.glob("vocabulary-*")
    output = io.BytesIO()
    export(store, [folder], output)

    def twice(parts: dict[str, bytes]) -> None:
        size = len(parts["datastore/manifest.json"])
        parts.update({name.replace("/", f"/{folder.name}/"): data for name, data in parts.items() if "/" in name})
        folders = [{"folder": where, "manifest": size} for where in ("", folder.name)]
        parts[HEAD] = resealed(parts[HEAD], indexes=folders)

    refused(forged(output.getvalue(), twice), tmp_path / "home", "two indexes for one vocabulary")


def test_damage_is_found_by_the_export(store, tmp_path):
    (file,) = store.glob("vocabulary-*/*.order.bin")
    data = file.read_bytes()
    for damaged, match in ((b"?" + data[1:], "checksum"), (data[:-1], "another size")):
        file.write_bytes(damaged)
        with pytest.raises(DatastoreCorrupt, match=match):
            export_file(store, indexes(store), tmp_path / "out.tar")
        output = io.BytesIO()
        with pytest.raises(DatastoreCorrupt, match=match):
            export(store, indexes(store), output)
        refused(output.getvalue(), tmp_path / "home", "ends early")
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match="is missing"):
        export_file(store, indexes(store), tmp_path / "out.tar")
    assert names(tmp_path) == {"home", "store"}


def test_an_export_keeps_the_commit_that_it_found(store):
    class Late(io.BytesIO):
        """A build commits when the first bytes are written."""

        def write(self, data):
            if not self.tell():
                make(store, MORE)
            return super().write(data)

    output = Late()
    export(store, indexes(store), output)
    assert content_of(store) == MORE
    assert held(imported(output.getvalue(), "copy")) == BOTH


def test_a_commit_between_the_manifest_and_the_files_is_no_damage(store, monkeypatch):
    reads = []

    def late(directory: Path):
        found = read_manifest(directory)
        if not reads:
            make(store, MORE)
        reads.append(directory)
        return found

    monkeypatch.setattr(moving, "read_manifest", late)
    assert held(imported(exported(store), "copy")) == {"toy": MORE, "other": OLD}


def test_a_file_is_written_as_a_whole_and_not_over_another(store, tmp_path):
    file = tmp_path / "out.tar"
    export_file(store, indexes(store), file)
    assert file.read_bytes() == exported(store)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(DatastoreError, match="`replace`"):
        export_file(store, indexes(store), file)
    with files_up_to(700), pytest.raises(DatastoreError, match=r"out\.tar: cannot be written: File too large"):
        export_file(store, indexes(store), file, overwrite=True)
    assert file.read_bytes() == exported(store)
    assert names(tmp_path) == {"out.tar", "store"}
    export_file(store, indexes(store), file, overwrite=True)
    with pytest.raises(DatastoreError, match="No such file"):
        export_file(store, indexes(store), tmp_path / "missing" / "out.tar")


SMALL = {"toy": OLD, "other": {"a": [1]}}


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    """The export of a datastore with SMALL."""
    return exported(make(make(tmp_path / "small", OLD), SMALL["other"], vocabulary=OTHER))


def target_of(path: Path, content: dict[str, list[int]] | None) -> Path:
    if content:
        make(make(path, content), content, vocabulary=OTHER)
    return path


@pytest.mark.parametrize("old", [None, MORE], ids=["new", "replacing"])
def test_killed_before_any_step_of_an_import(small, tmp_path, old):
    (tmp_path / "home").mkdir()
    path, seen = target_of(tmp_path / "home" / "store", old), []
    for state in kills(path.parent, lambda files: imported(small, path, files=files, replace=True)):
        put_tree(path.parent, state.tree)
        seen.append(held(path))
        if old:
            assert all(seen[-1][name] in (old, SMALL[name]) for name in SMALL)
        else:
            assert seen[-1] in ({}, SMALL)
        imported(small, path, replace=True)
        assert held(path) == SMALL
        assert orphans(path) == set()
        assert names(path.parent) == {"store"}, "an import deletes what a killed one left"
    assert seen[0] == ({"toy": old, "other": old} if old else {})
    assert seen[-1] == SMALL


@pytest.mark.parametrize("old", [None, MORE], ids=["new", "replacing"])
def test_a_disk_that_fails_at_every_step_of_an_import(small, tmp_path, old):
    counted = Named()
    imported(small, target_of(tmp_path / "counted", old), files=counted, replace=True)
    origin, home, failed = target_of(tmp_path / "origin", old), tmp_path / "failing", 0
    for failing in range(1, counted.steps + 1):
        path = shutil.copytree(origin, home / str(failing)) if old else home / str(failing)
        try:
            imported(small, path, files=Named(fail_at(failing, errno.EIO)), replace=True)
        except DatastoreUnwritable:
            failed += 1
            found = held(path)
            assert all(found[name] in (old, SMALL[name]) for name in SMALL) if old else found == {}
        else:
            assert held(path) == SMALL
        assert held(imported(small, path, replace=True)) == SMALL
        assert orphans(path) == set()
        assert names(home) == {path.name}
        shutil.rmtree(path)
    assert failed > counted.steps // 2


def test_a_writer_and_another_import_are_left_alone(store, tmp_path):
    path = make(tmp_path / "home" / "store", MORE)
    place = path.parent / f".importing-{'0' * 16}"
    place.mkdir()
    with locked(path), locked(place):
        with pytest.raises(DatastoreLocked):
            imported(exported(store), replace=True)
        assert held(path) == {"toy": MORE}
        assert names(path.parent) == {"store", place.name}
    imported(exported(store), replace=True)
    assert names(path.parent) == {"store"}
