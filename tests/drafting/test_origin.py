"""The origin of a drafted token is reported if it is known; an error there never ends an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rest_local.drafting.growth import Origin, origins_of
from rest_local.drafting.sources import Sources
from rest_local.errors import DatastoreCorrupt
from rest_local.planning.plan import draft
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId

TEXT = list(range(100, 140))


def origins_in(path: Path) -> list[Origin | None]:
    """The origins of two tokens that a datastore of TEXT drafts, and of one that it does not."""
    with Datastore.open(path) as store:
        sources = Sources([store], 1000)
        sources.restart(TEXT[:10])
        drafted = draft(sources.rows(), lambda cell: 0.9, lambda probability: True, 2, 1)
        return origins_of(drafted, [*TEXT[10:12], 1], lambda tokens: "line\n" * len(tokens))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    build(path, [("a.py", np.array(TEXT, np.int32))], vocabulary=VocabularyId("0" * 64, 1000, "test"), recipe={})
    return path


def test_a_drafted_token_has_a_file_and_a_line(path: Path) -> None:
    first, second, last = origins_in(path)
    assert first is not None
    assert second is not None
    assert last is None
    assert [(origin.source, origin.file, origin.match) for origin in (first, second)] == [
        ("datastore", "a.py", 10),
        ("datastore", "a.py", 11),
    ]
    assert (first.line, second.line) == (11, 12)


@pytest.mark.parametrize("fault", [DatastoreCorrupt("store", "names"), IndexError("position"), OSError("gone")])
def test_a_damaged_table_only_hides_the_place(path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Datastore, position: int) -> tuple[str, int]:
        raise fault

    monkeypatch.setattr(Datastore, "locate", damaged)
    first, second, _ = origins_in(path)
    assert first is not None
    assert second is not None
    assert {(origin.source, origin.file, origin.line) for origin in (first, second)} == {("datastore", None, None)}
