"""A generation over a damaged datastore gives the tokens of plain decoding, whatever bit was flipped."""

from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import END, N_VOCAB, FakeBackend, Greedy, plain
from support.fake_sequences import TREE, Alone
from support.fake_sources import Keen
from support.files import overwrite
from support.prices import FLAT

from rest_local.drafting.sources import Sources
from rest_local.errors import DatastoreCorrupt
from rest_local.kv_cache.slot import Slot
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.home import read_manifest

PROMPT = [3, 1, 4]
ANSWER = plain(PROMPT, Greedy(), 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Build a datastore of the very answer, so that an intact one drafts all of it."""
    path = tmp_path / "store"
    tokens = np.array([*PROMPT, *ANSWER], np.int32)
    build(path, [("a", tokens)], vocabulary=VocabularyId("0" * 64, N_VOCAB, "fake"), recipe={})
    return path


def generate(store: Datastore) -> tuple[list[int], int]:
    """Return (tokens, accepted ones of the drafts), with a real lookup at every step and exact arithmetic."""
    backend = FakeBackend(n_ctx=64)
    sources = Sources([store], N_VOCAB)
    sources.restart(PROMPT)
    task = Alone(backend, Slot(backend), Keen(FLAT), sources, Greedy(), TREE, lambda token: token == END)
    task.evaluate(PROMPT)
    out: list[int] = []
    while len(out) < len(ANSWER):
        out += task.step(len(ANSWER) - len(out)).tokens
    return out, task.statistics.accepted


def test_flipped_bits_give_the_same_tokens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of the order, which lookups follow; of the other files each bit in its turn, of every seventh byte
    or so."""
    with Datastore.open(path) as store:
        tokens, accepted = generate(store)
    assert tokens == ANSWER
    assert accepted >= len(ANSWER) // 2
    manifest = read_manifest(path)
    monkeypatch.setattr("rest_local.retrieval.datastore.read_manifest", lambda directory: manifest)
    opened = drafted = undrafted = 0
    for file in sorted(path.glob("*.bin")):
        data = file.read_bytes()
        bits = range(8 * len(data)) if ".order." in file.name else range(0, 8 * len(data), 59)
        for bit in bits:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            overwrite(file, flipped)
            try:
                store = Datastore.open(path)
            except DatastoreCorrupt:
                continue
            with store:
                tokens, accepted = generate(store)
            assert tokens == ANSWER, (file.name, bit)
            opened, drafted, undrafted = opened + 1, drafted + (accepted > 0), undrafted + (accepted == 0)
        overwrite(file, data)
    assert opened > 100
    assert drafted
    assert undrafted


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_every_entry_of_the_order_set_to_an_extreme(path: Path, value: int) -> None:
    (order,) = path.glob("*.order.bin")
    data = order.read_bytes()
    for at in range(0, len(data), 4):
        overwrite(order, data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
        with Datastore.open(path) as store:
            assert generate(store)[0] == ANSWER


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_cut_during_a_generation_costs_the_drafts_only(
    path: Path, mmap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Mapped, it is noticed before the lookup: reading beyond the new end would kill this process by SIGBUS."""
    with Datastore.open(path, mmap=mmap) as store:
        for file in path.glob("*.bin"):
            with file.open("r+b") as cut:
                cut.truncate(0)
        tokens, accepted = generate(store)
    assert tokens == ANSWER
    assert (accepted == 0) == mmap
    assert [record.levelname for record in caplog.records] == (["WARNING"] if mmap else [])
