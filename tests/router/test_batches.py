"""Batches with the `openai` package: results, cancelling, expiry, keys, priority, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_server import BatchLive, Script, batch_server, ended, jsonl, lines, records, until

from rest_local.router import batch_running
from rest_local.router.files import Limits

COMPLETIONS = "/v1/completions"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def live(tmp_path: Path, script: Script) -> Iterator[BatchLive]:
    with batch_server(tmp_path / "kept", script.ask) as live:
        yield live


def made(client: openai.OpenAI, some: list[Any] | bytes, endpoint: str = COMPLETIONS, **options: Any) -> Any:
    """A batch of these lines."""
    data = some if isinstance(some, bytes) else jsonl(some)
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    options = {"completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)


def test_a_batch_is_answered_line_by_line(live: BatchLive, script: Script) -> None:
    client = live.openai()
    begun = made(client, lines(20), metadata={"night": "1"})
    assert (begun.object, begun.endpoint, begun.metadata) == ("batch", COMPLETIONS, {"night": "1"})
    batch = ended(client, begun.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    assert batch.error_file_id is None
    assert batch.errors is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    found = records(client, batch.output_file_id)
    said = {each["custom_id"]: each["response"]["body"]["said"] for each in found}
    assert said == {f"n{number}": f"p{number}" for number in range(20)}
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in found)
    assert len({each["id"] for each in found}) == len({each["response"]["request_id"] for each in found}) == 20
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(output.id).content)
    assert {path for path, _, _ in script.calls} == {COMPLETIONS}


def test_requests_of_a_batch_are_not_streamed_and_give_way(live: BatchLive, script: Script) -> None:
    client = live.openai()
    ended(client, made(client, lines(1, stream=True, stream_options={"include_usage": True}, seed=3)).id)
    assert script.calls[0][1] == {"prompt": "p0", "seed": 3, "service_tier": "flex"}
    embedded = [line | {"url": "/v1/embeddings", "body": {"input": "x"}} for line in lines(1)]
    ended(client, made(client, embedded, "/v1/embeddings").id)
    assert script.calls[1][1] == {"input": "x"}


def test_refused_lines_are_errors_and_the_others_answers(live: BatchLive, script: Script) -> None:
    refused = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_value"}}
    script.answer = lambda body: (400, refused) if body["prompt"] == "p3" else (200, {"said": body["prompt"]})
    client = live.openai()
    batch = ended(client, made(client, lines(6)).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 5, 1)
    (error,) = records(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"], error["response"]["body"]) == ("n3", 400, refused)
    assert len(records(client, batch.output_file_id)) == 5


@pytest.mark.parametrize(
    ("wrong", "code", "line", "param"),
    [
        (b"", "empty_file", None, None),
        (b" \n\n", "empty_file", None, None),
        (jsonl(lines(1)) + b"{not json\n", "invalid_json_line", 2, None),
        (jsonl(lines(1)) + b'"a text"\n', "invalid_json_line", 2, None),
        (b"\x1f\x8b\x08 compressed", "invalid_file", None, None),
        (b"\xff\xfe\n", "invalid_json_line", 1, None),
        (b'{"custom_id": "\\ud800"}\n', "invalid_json_line", 1, None),
        (jsonl(lines(2)[:1] * 2), "duplicate_custom_id", 2, "custom_id"),
        (jsonl([lines(1)[0] | {"url": "/v1/chat/completions"}]), "invalid_url", 1, "url"),
        (jsonl([lines(1)[0] | {"url": "/tokenize"}]), "invalid_url", 1, "url"),
        (jsonl([lines(1)[0] | {"method": "GET"}]), "invalid_value", 1, "method"),
        (jsonl([lines(1)[0] | {"body": None}]), "missing_field", 1, "body"),
        (jsonl([lines(1)[0] | {"body": [1]}]), "missing_field", 1, "body"),
        (jsonl([lines(1)[0] | {"custom_id": None}]), "missing_field", 1, "custom_id"),
        (jsonl([lines(1)[0] | {"custom_id": 5}]), "invalid_value", 1, "custom_id"),
        (jsonl([lines(1)[0] | {"custom_id": "x" * 600}]), "invalid_value", 1, "custom_id"),
        (jsonl([{"prompt": "x"}]), "missing_field", 1, "custom_id"),
    ],
)
def test_a_wrong_line_fails_the_batch_before_any_is_run(
    live: BatchLive, script: Script, wrong: bytes, code: str, line: int | None, param: str | None
) -> None:
    client = live.openai()
    batch = ended(client, made(client, wrong).id)
    assert batch.status == "failed"
    first = batch.errors.data[0]
    assert (first.code, first.line, first.param) == (code, line, param)
    assert first.message
    assert (batch.output_file_id, batch.error_file_id, script.calls) == (None, None, [])


def test_every_wrong_line_is_named(live: BatchLive) -> None:
    client = live.openai()
    batch = ended(client, made(client, b"x\n" + jsonl(lines(1)) + b"\ny\n").id)
    assert [each.line for each in batch.errors.data] == [1, 4]


def test_errors_of_a_hopeless_file_are_bounded(live: BatchLive) -> None:
    client = live.openai()
    assert len(ended(client, made(client, b"x\n" * 5_000).id).errors.data) == 100


def test_too_many_lines(tmp_path: Path, script: Script) -> None:
    with batch_server(tmp_path, script.ask, limits=Limits(lines=3)) as live:
        client = live.openai()
        assert ended(client, made(client, lines(3)).id).status == "completed"
        batch = ended(client, made(client, lines(4)).id)
        assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == (
            "failed",
            "too_many_requests",
            4,
        )


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"input_file_id": 5}, 400, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"endpoint": "/completion"}, 400, "endpoint"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
    ],
)
def test_a_wrong_batch_is_refused(live: BatchLive, change: dict[str, Any], status: int, param: str) -> None:
    file = live.openai().files.create(file=("input.jsonl", jsonl(lines(1))), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"} | change
    answer = live.call("POST", "/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert live.openai().batches.list().data == []


def test_a_result_is_no_input(live: BatchLive) -> None:
    client = live.openai()
    batch = ended(client, made(client, lines(1)).id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h")


def test_batches_are_listed_in_pages(live: BatchLive, script: Script) -> None:
    client = live.openai()
    ids = [made(client, lines(1)).id for _ in range(5)]
    assert [each.id for each in client.batches.list(limit=2)] == ids[::-1], "the client follows the pages"
    page = client.batches.list(limit=2, after=ids[2])
    assert [each.id for each in page.data] == [ids[1], ids[0]]
    assert not page.has_more
    for query in ("limit=0", "limit=101", "limit=x", "after=batch_none"):
        assert live.call("GET", f"/v1/batches?{query}").status_code == 400


def test_an_unknown_batch(live: BatchLive) -> None:
    for method, path in (("GET", "/v1/batches/x"), ("POST", "/v1/batches/batch_0/cancel")):
        answer = live.call(method, path, json={} if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")


def test_cancel_keeps_the_results_so_far(live: BatchLive, script: Script) -> None:
    client = live.openai()
    script.answer = lambda body: (script.hold.clear() if len(script.calls) > 9 else None, (200, {}))[1]
    begun = made(client, lines(50))
    until(lambda: script.running and not script.hold.is_set() and len(script.calls) >= 12)
    under_way = script.running  # another line may begin until the batch is cancelled
    assert client.batches.cancel(begun.id).status == "cancelling"
    batch = ended(client, begun.id)
    assert (batch.status, script.running) == ("cancelled", 0)
    assert under_way <= script.cancelled <= script.slots
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert len(good) == batch.request_counts.completed >= 9
    assert {each["custom_id"] for each in good + bad} == {f"n{number}" for number in range(50)}
    assert len(good + bad) == 50
    assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
    assert batch.cancelling_at <= batch.cancelled_at
    assert client.batches.cancel(begun.id).status == "cancelled", "again changes nothing"


def test_a_batch_that_waits_is_cancelled_at_once(live: BatchLive, script: Script) -> None:
    client = live.openai()
    script.hold.clear()
    first, second = made(client, lines(2)), made(client, lines(2))
    until(lambda: script.running)
    assert client.batches.cancel(second.id).status == "cancelled"
    script.hold.set()
    assert ended(client, first.id).status == "completed"
    assert len(script.calls) == 2


def test_a_batch_that_is_done_cannot_be_cancelled(live: BatchLive) -> None:
    client = live.openai()
    batch = ended(client, made(client, lines(1)).id)
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)


def test_what_has_no_answer_when_the_time_is_over_is_an_error(tmp_path: Path, script: Script) -> None:
    late = 0.0
    script.answer = lambda body: (script.hold.clear() if len(script.calls) > 4 else None, (200, {}))[1]
    import time

    with batch_server(tmp_path, script.ask, clock=lambda: time.time() + late) as live:
        client = live.openai()
        begun = made(client, lines(20), completion_window="1h")
        until(lambda: script.running and not script.hold.is_set())
        late = 3700.0
        batch = ended(client, begun.id)
    assert batch.status == "expired"


def test_a_server_that_is_busy_is_waited_for(live: BatchLive, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_running, "FIRST_PAUSE", 0.01)
    busy = {"error": {"message": "full", "code": "busy"}}
    script.answer = lambda body: (503, busy) if len(script.calls) < 30 else (200, {})
    client = live.openai()
    batch = ended(client, made(client, lines(3)).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)


def test_a_fault_of_the_server_is_tried_again_and_then_an_error(
    live: BatchLive, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_running, "FIRST_PAUSE", 0.01)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"] == "p1":
            raise ConnectionError("the child died")
        return (500, {"error": {"code": None}}) if sum(c[1] == body for c in script.calls) < 3 else (200, {})

    script.answer = answer
    client = live.openai()
    batch = ended(client, made(client, lines(3)).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    (error,) = records(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("n1", 502)
    assert len(script.calls) == 9


def test_one_slot_stays_free(live: BatchLive, script: Script) -> None:
    client = live.openai()
    script.hold.clear()
    begun = made(client, lines(10))
    until(lambda: script.running >= 3)
    looked = sum(script.looks.values())
    until(lambda: sum(script.looks.values()) > looked + 1)  # one more line would have been started
    script.hold.set()
    ended(client, begun.id)
    assert script.most == 3


def test_nothing_is_started_while_others_are_served(live: BatchLive, script: Script) -> None:
    client = live.openai()
    script.others = 1
    begun = made(client, lines(4))
    until(lambda: sum(script.looks.values()) > 3)
    assert script.calls == []
    script.others = 0
    assert ended(client, begun.id).status == "completed"


def test_a_batch_makes_some_progress_on_a_server_that_is_never_idle(
    live: BatchLive, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_running, "TRICKLE_SECONDS", 0.0)
    script.others = 4
    client = live.openai()
    assert ended(client, made(client, lines(3)).id).status == "completed"
    assert script.most == 1


def test_lines_of_a_model_run_together(live: BatchLive, script: Script) -> None:
    some = lines(12)
    for number, line in enumerate(some):
        line["body"]["model"] = ("a", "b", "a c?")[number % 3]
    client = live.openai()
    assert ended(client, made(client, some).id).request_counts.completed == 12
    models = [body["model"] for _, body, _ in script.calls]
    assert models == ["a"] * 4 + ["b"] * 4 + ["a c?"] * 4
    assert set(script.looks) == {"/slots?model=a", "/slots?model=b", "/slots?model=a%20c%3F"}


def test_a_key_sees_and_uses_only_its_own(tmp_path: Path, script: Script) -> None:
    with batch_server(tmp_path, script.ask, keys=(b"one", b"two")) as live:
        one, two = live.openai("one"), live.openai("two")
        batch = ended(one, made(one, lines(2)).id)
        assert {key for _, _, key in script.calls} == {b"one"}
        assert (list(two.batches.list()), list(two.files.list())) == ([], [])
        for file_id in (batch.input_file_id, batch.output_file_id):
            for call in (two.files.retrieve, two.files.content, two.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(file_id)
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        ended(two, made(two, lines(1)).id)
        assert script.calls[-1][2] == b"two"
        with pytest.raises(openai.AuthenticationError):
            live.openai("three").files.list()
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
        assert b'"one"' not in kept
        assert b'"two"' not in kept


def test_keys_take_turns(tmp_path: Path, script: Script) -> None:
    """A key with many batches keeps another one waiting for one of them."""
    script.hold.clear()
    with batch_server(tmp_path, script.ask, keys=(b"one", b"two")) as live:
        one, two = live.openai("one"), live.openai("two")
        batches = [made(one, lines(1)).id for _ in range(3)]
        until(lambda: len(script.calls) == 1)
        late = made(two, lines(1)).id
        script.hold.set()
        ended(two, late)
        for batch in batches:
            ended(one, batch)
    assert [key for _, _, key in script.calls] == [b"one", b"two", b"one", b"one"]


def test_too_many_batches(tmp_path: Path, script: Script) -> None:
    script.hold.clear()
    with batch_server(tmp_path, script.ask, limits=Limits(batches=2)) as live:
        client = live.openai()
        for _ in range(2):
            made(client, lines(1))
        with pytest.raises(openai.RateLimitError, match="not done"):
            made(client, lines(1))
        script.hold.set()


def test_records_of_old_batches_are_bounded(tmp_path: Path, script: Script) -> None:
    with batch_server(tmp_path, script.ask, limits=Limits(records=2)) as live:
        client = live.openai()
        ids = [ended(client, made(client, lines(1)).id).id for _ in range(4)]
        import asyncio

        asyncio.run_coroutine_threadsafe(live.batches._sweep(), live.loop).result(30)
        assert [each.id for each in client.batches.list()] == [ids[3], ids[2]]
    assert len(list((tmp_path / "batches").iterdir())) == 2


def test_an_input_of_a_running_batch_cannot_be_deleted(live: BatchLive, script: Script) -> None:
    client = live.openai()
    script.hold.clear()
    begun = made(client, lines(3))
    with pytest.raises(openai.ConflictError, match=begun.id):
        client.files.delete(begun.input_file_id)
    script.hold.set()
    batch = ended(client, begun.id)
    assert client.files.delete(batch.input_file_id).deleted
    assert client.files.delete(batch.output_file_id).deleted
    again = client.batches.retrieve(batch.id)
    assert again.output_file_id == batch.output_file_id
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


def test_an_answer_that_is_no_json_is_an_error_of_its_line(
    live: BatchLive, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_running, "FIRST_PAUSE", 0.01)

    async def ask(method: str, path: str, body: bytes, key: bytes | None) -> tuple[int, bytes]:
        return 200, b"<html>"

    assert live.batches is not None
    live.batches._ask = ask
    client = live.openai()
    batch = ended(client, made(client, lines(1)).id)
    (error,) = records(client, batch.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "failed"
    assert json.loads(client.files.content(batch.error_file_id).text) == error
