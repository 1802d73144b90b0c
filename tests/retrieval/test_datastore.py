"""An open datastore gives rows over all segments as one text. Anything else is refused with a clear error."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_right, every_row
from stores import NEW, OLD, VOCABULARY, array, content_of, make
from support.examples import few
from support.files import overwrite

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreNotFound,
    DatastoreUnwritable,
    DatastoreVersion,
    DatastoreVocabulary,
)
from rest_local.retrieval import MAX_MATCH, Datastore
from rest_local.retrieval.format import KINDS, MANIFEST, Manifest, sealed
from rest_local.retrieval.home import read_manifest

CONTEXT = np.array([9, 9, 2])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store", NEW, segment_tokens=12)


def rewrite(path: Path, change) -> None:
    """Change fields of the manifest and seal it again, which no bit flip can do."""
    manifest = path / MANIFEST
    fields = json.loads(manifest.read_bytes())
    del fields["sha256"]
    change(fields)
    manifest.write_bytes(sealed(fields))


def check_rows(store: Datastore) -> None:
    rows = store.rows(CONTEXT, 8, 4)
    assert rows.continuations.max(initial=-1) < VOCABULARY.size
    assert 1 <= rows.match.min(initial=1) <= rows.match.max(initial=1) <= MAX_MATCH
    check_places(store, rows.positions)


def check_find(store: Datastore) -> None:
    match, count, positions = store.find(CONTEXT, 5)
    assert 0 <= match <= MAX_MATCH
    assert len(positions) <= min(count, 5) <= len(store)
    check_places(store, positions)


def check_places(store: Datastore, positions: np.ndarray) -> None:
    """Check that each position is inside the text. Its name and line may be damaged."""
    assert all(0 < position < len(store) for position in positions.tolist())
    for position in positions.tolist():
        with contextlib.suppress(DatastoreCorrupt):
            _, line, offset = store.place(position, decode)
            assert 1 <= line <= offset + 1 <= len(store)


def decode(tokens: Sequence[int]) -> str:
    assert all(0 <= token < VOCABULARY.size for token in tokens), "ids that a vocabulary does not have"
    return "\n" * len(tokens)


def check_names(store: Datastore) -> None:
    assert len(store.document_names()) == store.info()["documents"]
    for index in range(len(store.segments)):
        assert all(len(tokens) and tokens.max() < VOCABULARY.size for _, tokens, _ in store.documents(index))


USES: dict[str, Callable[[Datastore], object]] = {
    "rows": check_rows,
    "find": check_find,
    "to_leave_off": lambda store: store.to_leave_off(CONTEXT),
    "place": lambda store: [store.place(position, decode) for position in range(len(store))],
    "names": check_names,
    "check": Datastore.check,
}
"""All operations of a reader. On damaged files each fulfils its contract or raises DatastoreCorrupt."""


def use(path: Path) -> None:
    """Run every operation on files that may be damaged. Raises the last DatastoreCorrupt, if there was one."""
    caught = None
    with Datastore.open(path) as store:
        for checked in USES.values():
            try:
                checked(store)
            except DatastoreCorrupt as error:
                caught = error
    if caught:
        raise caught


@few(30)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=15), min_size=1, max_size=6),
    st.lists(st.sampled_from([0, 1, 2]), max_size=20),
    st.integers(1, 8),
    st.sampled_from([1, 10, 1000]),
    st.booleans(),
)
def test_rows_are_those_of_one_text_however_it_is_cut(tmp_path_factory, documents, context, limit, cap, mmap):
    path = tmp_path_factory.mktemp("stores") / "store"
    named = {str(index): document for index, document in enumerate(documents)}
    make(path, named, segment_tokens=cap)
    with Datastore.open(path, mmap=mmap) as store:
        expected = every_row(documents, context, 4)
        rows = store.rows(array(context), limit, 4)
        assert_right(rows, expected, limit)
        for position in rows.positions.tolist():
            name, offset = store.locate(position)
            assert store.before(position).tolist() == named[name][:offset]
        longest = max((match for match, _ in expected.values()), default=0)
        count = sum(match == longest for match, _ in expected.values())
        found = store.find(array(context), 1000)
        assert found[:2] == (longest, count)
        assert len(set(found[2].tolist())) == count


def test_files_are_private(store):
    assert store.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in store.iterdir()} == {0o600}


def test_another_vocabulary_is_refused_with_both_names_and_the_rebuild_command(store):
    Datastore.open(store, vocabulary_hash=VOCABULARY.hash).close()
    with pytest.raises(DatastoreVocabulary) as caught:
        Datastore.open(store, vocabulary_hash="cd" * 32, vocabulary_name="other")
    message = str(caught.value)
    assert "toy" in message
    assert "other" in message
    assert f"rest-local index rebuild {store} -m MODEL" in message


def test_every_truncation_is_noticed(tmp_path):
    store = make(tmp_path / "store", NEW)
    for file in sorted(store.glob("*[.]*")):
        data = file.read_bytes()
        for size in reversed(range(len(data))):
            os.truncate(file, size)
            with pytest.raises(DatastoreCorrupt) as caught:
                Datastore.open(store)
            assert str(store) in str(caught.value)
        file.write_bytes(data)
    use(store)


def flips(data: bytes):
    """Flip a bit of each byte, another one in every byte."""
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_a_flipped_bit_of_any_byte_of_a_segment_is_noticed_and_crashes_nothing(tmp_path, monkeypatch):
    store = make(tmp_path / "store", {"a": [9, 9, 2], "b": [9]})
    manifest = read_manifest(store)  # it is intact, and parsing it 2 400 times would double the time of the test
    monkeypatch.setattr("rest_local.retrieval.datastore.read_manifest", lambda directory: manifest)
    for file in sorted(store.glob("*.bin")):
        data = file.read_bytes()
        for flipped in flips(data):
            overwrite(file, flipped)
            with pytest.raises(DatastoreCorrupt):
                use(store)
        overwrite(file, data)
    use(store)


def test_a_flipped_bit_of_any_byte_of_a_manifest_is_noticed(store):
    for flipped in flips((store / MANIFEST).read_bytes()):
        with pytest.raises(DatastoreCorrupt):
            Manifest.parse(flipped, store)


def every_number(fields: dict, found: list | None = None) -> list:
    """Return (container, key) of each integer in the manifest but the revision, of which any is right."""
    found = [] if found is None else found
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, int) and key != "revision":
            found.append((fields, key))
        elif isinstance(value, dict | list):
            every_number(value, found)
    return found


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, 2**63, 1.5, True, None, "1", [], 10**400])
def test_no_number_of_the_manifest_is_believed(store, value):
    original = (store / MANIFEST).read_bytes()
    numbers = len(every_number(json.loads(original)))
    assert numbers == 2 + 2 * 5
    for index in range(numbers):

        def change(fields: dict, index: int = index) -> None:
            container, key = every_number(fields)[index]
            container[key] = value

        (store / MANIFEST).write_bytes(original)
        rewrite(store, change)
        with pytest.raises((DatastoreCorrupt, DatastoreVersion)):
            use(store)


@pytest.mark.parametrize("value", [0, 2**64 - 1, 2**31 - 1, 2**63, 1, 2])
def test_no_number_of_a_document_table_or_order_is_believed(store, value):
    for file in sorted(store.iterdir()):
        data = file.read_bytes()
        size = 8 if "documents" in file.name else 4
        if "documents" not in file.name and "order" not in file.name:
            continue
        new = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")
        for at in range(0, len(data) - size + 1, size):
            if data[at : at + size] != new:
                file.write_bytes(data[:at] + new + data[at + size :])
                with pytest.raises(DatastoreCorrupt):
                    use(store)
        file.write_bytes(data)


def test_entries_that_no_search_compared_are_checked_as_well(tmp_path):
    """A binary search reads few entries of a long run; the others are only read when they are listed."""
    store = make(tmp_path / "store", {"a": [7, 5] * 40})
    (order,) = store.glob("*.order.bin")
    entries = np.fromfile(order, "<u4")
    unseen = 0
    for rank in range(len(entries)):
        for value in (0, len(entries), 2**31, 2**32 - 1):
            damaged = entries.copy()
            damaged[rank] = value
            damaged.tofile(order)
            with Datastore.open(store) as opened:
                try:
                    check_places(opened, opened.find(array([7]), 1000)[2])
                    opened.rows(array([7]), 3)
                    opened.to_leave_off(array([7]))
                except DatastoreCorrupt as error:
                    unseen += "points outside" in str(error)
    assert unseen > 100


def test_a_text_that_no_separator_ends_is_corrupt(store):
    """The last position then has a match, and the position after it does not exist."""
    for file in store.glob("*.tokens.bin"):
        data = bytearray(file.read_bytes())
        data[2 * 64 : 2 * 65] = data[2 * 65 : 2 * 66]
        file.write_bytes(data)
        with pytest.raises(DatastoreCorrupt, match="separator"):
            Datastore.open(store)


WRONG = {
    "model": [5, None, ["model.gguf"]],
    "kind": [0],
    "description": [{}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_recipe_of_wrong_types_is_neither_read_nor_written(store, tmp_path, key, value):
    rewrite(store, lambda fields: fields["recipe"].update({key: value}))
    with pytest.raises(DatastoreCorrupt, match=f"{key} of the recipe"):
        Datastore.open(store)
    with pytest.raises(ValueError, match=f"{key} of the recipe"):
        make(tmp_path / "new", OLD, recipe={key: value})
    assert not (tmp_path / "new" / MANIFEST).exists()


def test_a_manifest_nested_too_deeply_is_corrupt(store):
    """JSON is read to a depth at which it cannot be written again, and the checksum is over what is written.

    At every depth up to the limit of recursion and beyond it. The limit is lowered: a depth costs its square.
    """
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 250)
    try:
        for depth in range(50, 350):
            content = b'{"a": ' + b"[" * depth + b"]" * depth + b', "sha256": "00"}'
            with pytest.raises(DatastoreCorrupt):
                Manifest.parse(content, store)
    finally:
        sys.setrecursionlimit(usual)


def test_errors_show_no_control_characters_of_a_file(store):
    evil = "\x1b[31mred\r\n\u202e"
    rewrite(store, lambda fields: fields["vocabulary"].update(name=evil))
    with pytest.raises(DatastoreVocabulary) as vocabulary:
        Datastore.open(store, vocabulary_hash="cd" * 32, vocabulary_name="other")
    rewrite(store, lambda fields: fields["recipe"].update(paths=[evil]))
    with pytest.raises(DatastoreVocabulary) as recipe:
        Datastore.open(store, vocabulary_hash="cd" * 32, vocabulary_name="other")
    rewrite(store, lambda fields: fields.update(format=evil))
    with pytest.raises(DatastoreVersion) as version:
        Datastore.open(store)
    for caught in (vocabulary, recipe, version):
        assert "red" in str(caught.value)
        assert str(caught.value).isprintable()


def test_missing_files_orphans_unknown_fields_and_segments_named_twice(store):
    (store / "0123456789abcdef.tokens.bin").write_bytes(b"orphan")
    rewrite(store, lambda fields: fields.update(unknown={"a": [1]}))
    assert content_of(store) == NEW
    rewrite(store, lambda fields: fields["segments"].append(fields["segments"][0]))
    with pytest.raises(DatastoreCorrupt, match="twice"):
        Datastore.open(store)
    rewrite(store, lambda fields: fields["segments"].pop())
    for kind in KINDS:
        file = next(store.glob(f"*[!f].{kind}.bin"))
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(DatastoreCorrupt, match=file.name):
            Datastore.open(store)
        file.write_bytes(data)
    assert content_of(store) == NEW


@pytest.mark.parametrize("name", ["../../etc/passwd", "0123", "0123456789ABCDEF", "0123456789abcdef\n", 5])
def test_a_segment_name_is_no_path(store, name):
    rewrite(store, lambda fields: fields["segments"][0].update(name=name))
    with pytest.raises(DatastoreCorrupt, match="name"):
        Datastore.open(store)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF\x03\x00", "GGUF"),
        (b"PK\x03\x04zip", "zip"),
        (sealed({"magic": "rest-local datastore", "format": 3}), "format 3, this version reads 2"),
        (sealed({"magic": "rest-local datastore", "format": 1}), "format 1, this version reads 2"),
        (sealed({"magic": "other"}), "other"),
    ],
)
def test_other_formats_are_named_with_the_remedies(store, content, words):
    (store / MANIFEST).write_bytes(content)
    with pytest.raises(DatastoreVersion) as caught:
        Datastore.open(store)
    assert words in str(caught.value)
    assert "update rest-local, or build it again" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"magic": NaN}', b'{"a": 1}'])
def test_a_manifest_that_is_none_is_corrupt(store, content):
    (store / MANIFEST).write_bytes(content)
    with pytest.raises(DatastoreCorrupt):
        Datastore.open(store)


def test_paths_that_are_no_datastore(tmp_path):
    with pytest.raises(DatastoreNotFound):
        Datastore.open(tmp_path / "nothing")
    with pytest.raises(DatastoreNotFound):
        Datastore.open(tmp_path)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(DatastoreVersion):
        Datastore.open(model)


@pytest.mark.usefixtures("unprivileged")
def test_an_unreadable_datastore_is_a_clear_error(store):
    for name in (MANIFEST, next(store.glob("*.order.bin")).name):
        (store / name).chmod(0)
        with pytest.raises(DatastoreError, match=rf"{name}.* cannot be read.*Permission denied"):
            Datastore.open(store)
        (store / name).chmod(0o600)
    Datastore.open(store).close()


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_directory_is_read_and_not_written(store):
    """Reading needs no lock. Writing is refused with the path, and the content stays."""
    store.chmod(0o500)
    try:
        assert content_of(store) == NEW
        with pytest.raises(DatastoreUnwritable, match="Permission denied"):
            make(store, OLD)
    finally:
        store.chmod(0o700)
    assert content_of(store) == NEW
    make(store, OLD)
    assert content_of(store) == OLD


def test_a_reader_keeps_its_snapshot_while_it_is_replaced(store):
    with Datastore.open(store) as before:
        make(store, OLD)
        assert before.rows(CONTEXT, 4, 1).continuations[0, 0] == 6
        with Datastore.open(store) as after:
            assert after.rows(CONTEXT, 4, 1).continuations[0, 0] == 5


def test_rows_outlive_the_datastore_and_close_may_be_repeated(store):
    opened = Datastore.open(store)
    rows = opened.rows(CONTEXT, 4, 1)
    opened.close()
    opened.close()
    assert rows.continuations[0].tolist() == [6]
    assert len(opened.rows(CONTEXT)) == 0
