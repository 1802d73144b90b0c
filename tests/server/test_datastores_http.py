"""Datastores over HTTP: they are listed, and requests name those that they draft from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Live, Scripted, served
from support.toy import demo_model

from rest_local.decoding.engine import Engine
from rest_local.retrieval import VocabularyId, build
from rest_local.retrieval.home import datastore_path
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

PROMPT = "def quixotic_name(first, second):\n    return first * 17 + second * 23\n" * 2
BODY: dict[str, Any] = {"prompt": PROMPT[:-30], "n_predict": 30, "temperature": 0, "rest_local": {"policy": "rest"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Serve the demo model with a datastore that has the answer to BODY and an index of another vocabulary too."""
    with Engine.load(demo_model(), policy="off") as engine:
        answer = engine.generate(BODY["prompt"], max_tokens=30).wait().text
        tokens = engine.tokenize(BODY["prompt"] + answer)
        identity = VocabularyId(*engine.model.vocabulary.identity)
    other, document = VocabularyId("cd" * 32, 1000, "other"), np.array([1, 2, 3], np.int32)
    for name in ("answers", "foreign"):
        build(datastore_path(name), [("of another", document)], vocabulary=other)
    build(datastore_path("answers"), [("a.py", np.array(tokens))], vocabulary=identity)

    def load() -> Engine:
        return Engine.load(demo_model(), slots=2, datastores=[datastore_path("answers")])

    with served(Serving(ServerSettings(port=0), "demo", load, drain_seconds=5)) as live:
        assert live.serving.loaded.wait(300)
        yield live


def test_a_request_names_the_datastores_that_it_drafts_from(live: Live) -> None:
    without = live.post("/completion", BODY | {"datastore": []}).json()
    drafted = live.post("/completion", BODY | {"datastore": "answers"}).json()
    assert without["timings"]["draft_n"] == 0
    assert drafted["timings"]["draft_n_accepted"] > 0
    assert live.post("/completion", BODY | {"datastore": ["foreign"]}).status_code == 400, "it is not open"


def test_a_datastore_is_listed_as_the_model_has_it(live: Live) -> None:
    """One without an index for the model shows its first."""
    rows = {row["name"]: row for row in live.get("/datastores").json()["data"]}
    assert (rows["answers"]["open"], rows["answers"]["fits_model"], rows["answers"]["documents"]) == (True, True, 1)
    assert (rows["foreign"]["open"], rows["foreign"]["fits_model"], rows["foreign"]["tokens"]) == (False, False, 4)


@pytest.mark.parametrize("others", [False, True])
def test_a_damaged_datastore_is_listed_and_other_users_do_not_see_where_it_lies(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    path = datastore_path("broken")
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"{")
    live = scripted(keys=(b"k", b"other") if others else (b"k",))
    (row,) = live.get("/datastores", headers={"x-api-key": "k"}).json()["data"]
    assert (str(tmp_path) in row["error"]) != others
