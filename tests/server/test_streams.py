"""Clients that disconnect, wait or are too many (RELIABILITY 33), and what streams hide from other machines."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_service import FakeEngine, FakeService, origin
from live import Live, Scripted, data_of, sent, served

from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.results import Timings
from rest_local.decoding.stream import Piece, Progress
from rest_local.decoding.verify import Relaxed
from rest_local.errors import DecodeFailed, ModelNotFound
from rest_local.llama.options import MAX_SEED
from rest_local.server.app import Serving
from rest_local.server.http import listen
from rest_local.server.settings import ServerSettings

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PATHS = (CHAT_PATH, "/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/api/chat")


def asking(path: str) -> dict[str, Any]:
    given = {"input": "x"} if path == "/v1/responses" else {"prompt": "x", "messages": CHAT["messages"]}
    return {"model": "demo", "max_tokens": 99} | given


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_in_chunks_where_the_client_knows_them(scripted: Scripted, version: str) -> None:
    live = scripted(answer=("text",))
    data = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /completion HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        connection.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert (b"\r\n0\r\n\r\n" in answer) == (b"transfer-encoding: chunked" in answer.lower()) == (version == "1.1")
    begun = answer.partition(b"\r\n\r\n")[2]
    assert begun.startswith(b"data: {") == (version == "1.0")
    assert b'"content":"text"' in begun


@pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": False}, {"prompt": "x"}, {"prompt": "x", "stream": True}])
def test_a_client_that_goes_away_ends_its_request(quiet: Live, body: dict[str, Any]) -> None:
    connection = sent(quiet, CHAT_PATH if "messages" in body else "/completion", body)
    stream = quiet.service.stream()
    stream.give("some text")
    connection.close()
    assert stream.cancelled.wait(30)


def test_a_disconnect_before_the_first_token_ends_all_choices(quiet: Live) -> None:
    connection = sent(quiet, CHAT_PATH, CHAT | {"n": 3})
    streams = [quiet.service.stream(number) for number in range(3)]
    connection.close()
    assert all(stream.cancelled.wait(30) for stream in streams)


def test_a_full_queue_is_503_and_says_when_to_come_again(scripted: Scripted) -> None:
    live = scripted(room=2, answer=None)
    waiting = [sent(live, CHAT_PATH, CHAT) for _ in range(2)]
    streams = [live.service.stream(number) for number in range(2)]
    answer = live.post(CHAT_PATH, CHAT)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "unavailable_error"
    for connection in waiting:
        connection.close()
    assert all(stream.cancelled.wait(30) for stream in streams)
    live.service.answer = ("again",)
    assert live.post(CHAT_PATH, CHAT).status_code == 200


def test_choices_are_queued_together_or_refused_together(scripted: Scripted) -> None:
    live = scripted(room=2, answer=None)
    with sent(live, "/completion", {"prompt": "x"}), sent(live, "/completion", {"prompt": "x"}):
        streams = [live.service.stream(number) for number in range(2)]
        assert live.post(CHAT_PATH, CHAT | {"n": 3}).status_code == 503
        assert len(live.service.streams) == 2, "none of them was begun"
        for stream in streams:
            stream.end()
    live.service.answer = ("a",)
    assert len(live.post(CHAT_PATH, CHAT | {"n": 3, "stream": False}).json()["choices"]) == 3


def test_an_error_before_the_first_byte_has_its_status(quiet: Live) -> None:
    asked = quiet.later("/completion", {"prompt": "x"})
    quiet.service.stream().end("error", error=DecodeFailed(-3, 4))
    answer = asked.result(30)
    assert answer.status_code == 500
    assert "llama_decode returned -3" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_an_error_during_a_stream_is_its_last_event(quiet: Live, path: str) -> None:
    asked = quiet.later(path, asking(path) | {"stream": True})
    stream = quiet.service.stream()
    stream.give("half")
    stream.end("error", error=DecodeFailed(-3, 4))
    answer = asked.result(30)
    *before, last = [line for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert "half" in "".join(before)
    assert "llama_decode returned -3" in last
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("limit", [{"n_indent": 4}, {"t_max_predict_ms": 0.001}])
def test_a_complete_answer_stops_the_engine(quiet: Live, limit: dict[str, Any], stream: bool) -> None:
    """The model would continue after the block, or the line, that was requested."""
    asked = quiet.later("/completion", {"prompt": "if x:\n", "stream": stream, **limit})
    submitted = quiet.service.stream()
    for part in ("    y = 1\n", "    z = 2\n", "w = 3\n"):
        submitted.give(part)
    while not submitted.cancelled.wait(0.01):  # the time limit counts from the first text
        submitted.give("x = 4\n")
    submitted.give("v = 5\n")
    assert asked.result(30).status_code == 200
    assert "v = 5" not in asked.result().text


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_fails_ends_the_others(quiet: Live, stream: bool) -> None:
    asked = quiet.later(CHAT_PATH, CHAT | {"n": 3, "stream": stream})
    first, second, third = (quiet.service.stream(number) for number in range(3))
    second.end("error", error=DecodeFailed(-3, 4))
    assert first.cancelled.wait(30)
    assert third.cancelled.wait(30)
    assert "llama_decode returned -3" in asked.result(30).text
    assert asked.result().status_code == (200 if stream else 500)


def test_a_stop_lets_a_running_answer_end(scripted: Scripted) -> None:
    live = scripted(drain_seconds=30, answer=None)
    with live.client() as client, client.stream("POST", CHAT_PATH, json=CHAT) as answer:
        stream = live.service.stream()
        stream.give("first")
        live.serving.stop()
        while any(server.is_serving() for server in live.serving.servers):
            threading.Event().wait(0.01)  # asyncio does not close a connection that comes while it stops listening
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", live.port), timeout=30)
        stream.give(" last")
        stream.end("stop")
        text = answer.read().decode()
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in data_of(text)) == "first last"
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_ends_answers_with_an_error_after_the_drain_time(scripted: Scripted, path: str) -> None:
    """There is no bare 500, and no stream without an end."""
    live = scripted(drain_seconds=0, answer=None)
    body = asking(path)
    whole, stream = (live.later(path, body | {"stream": streams}) for streams in (False, True))
    for number in range(2):
        live.service.stream(number).give("some text")
    live.serving.stop()
    assert whole.result(30).status_code == 503
    assert "no more requests" in whole.result(30).text
    assert stream.result(30).status_code == 200
    assert "no more requests" in stream.result(30).text.splitlines()[-1 if path == "/api/chat" else -2]


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages"])
def test_a_silent_stream_is_kept_alive(scripted: Scripted, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """While a long prompt is evaluated: proxies end a connection that is silent for a minute."""
    monkeypatch.setattr("rest_local.server.answering.QUIET_SECONDS", 0.01)
    live = scripted(answer=None)
    body = asking(path) | {"stream": True}
    with live.client() as client, client.stream("POST", path, json=body) as answer:
        lines, quiet = answer.iter_lines(), ":"
        if path == "/api/chat":
            begin = json.loads(next(lines))
            assert (begin["message"], begin["done"]) == ({"role": "assistant", "content": ""}, False)
        else:
            assert [line for line, _ in zip((each for each in lines if each == quiet), range(2), strict=False)]
        live.service.say("Hello")
        assert "Hello" in "".join(lines)


def test_a_prompt_counts_once_for_all_answers_to_it(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    live = scripted()
    prompts = ["one", "two and three and four"]
    n = [len(live.post("/tokenize", {"content": each}).json()["tokens"]) for each in prompts]
    with caplog.at_level("INFO", "rest_local.server"):
        usage = live.post("/v1/completions", {"prompt": prompts, "n": 3}).json()["usage"]
        live.stop()
    told = [record.fields for record in caplog.records if hasattr(record, "fields")]
    (line,) = [each for each in told if each.get("path") == "/v1/completions"]
    assert usage["prompt_tokens"] == line["prompt_tokens"] == sum(n)
    assert usage["completion_tokens"] == line["completion_tokens"] > 0


def test_each_choice_has_a_seed_after_the_largest_too(hello: Live) -> None:
    hello.post("/v1/completions", {"prompt": "x", "n": 3, "seed": MAX_SEED - 1})
    seeds = [stream.request.sampling.seed for stream in hello.service.streams]
    assert seeds == [MAX_SEED - 1, MAX_SEED, 0]


def test_calls_are_503_while_the_model_loads() -> None:
    loads = threading.Event()

    def load() -> Any:
        assert loads.wait(60)
        return FakeEngine()

    serving = Serving(ServerSettings(port=0), "demo", load, start=lambda engine, queue: FakeService(engine))  # type: ignore[arg-type, return-value]
    with served(serving) as live:
        assert live.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert [model["name"] for model in live.get("/api/tags").json()["models"]] == ["demo:latest"]
        assert live.get("/api/ps").json() == {"models": []}
        for answer in (live.get("/health"), live.post(CHAT_PATH, CHAT), live.get("/props"), live.get("/slots")):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "Loading model"
            assert "retry-after" in answer.headers
        assert live.post("/api/generate", {}).status_code == 503, "which would only load it"
        refused = live.post("/v1/messages", CHAT | {"max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        loads.set()
        assert serving.loaded.wait(60)
        assert live.get("/health").json() == {"status": "ok"}


def test_a_model_that_does_not_load_ends_the_server() -> None:
    def load() -> Any:
        raise ModelNotFound("nothing.gguf")

    serving = Serving(ServerSettings(port=0), "demo", load)
    with listen(serving.settings) as listening, pytest.raises(ModelNotFound):
        serving.run([listening])


def test_accepted_predictions_are_counted_for_requests_with_a_prediction(scripted: Scripted) -> None:
    live = scripted()
    body = CHAT | {"stream": False, "prediction": {"type": "content", "content": "Hello"}}
    details = live.post(CHAT_PATH, body).json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    assert list(live.service.streams[-1].request.prediction) == live.serving.state.engine.tokenize("Hello")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    live.post(CHAT_PATH, body | {"prediction": {"type": "content", "content": parts}})
    assert list(live.service.streams[-1].request.prediction) == live.serving.state.engine.tokenize("a\nb")
    without = live.post(CHAT_PATH, CHAT | {"stream": False}).json()["usage"]
    assert "completion_tokens_details" not in without


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("strict", "strict"), ("relaxed", Relaxed()), ("relaxed:5,0.25", Relaxed(5, 0.25))],
)
def test_the_text_of_verify_becomes_its_rule(hello: Live, text: str | None, expected: Any) -> None:
    assert hello.post(CHAT_PATH, CHAT | {"stream": False, "rest_local": {"verify": text}}).status_code == 200
    assert hello.service.streams[-1].request.verify == expected


def test_a_text_of_verify_that_names_no_rule_is_refused(hello: Live) -> None:
    answer = hello.post(CHAT_PATH, CHAT | {"stream": False, "rest_local": {"verify": "loose"}})
    assert answer.status_code == 400
    assert "verify loose" in answer.json()["error"]["message"]


SYSTEM = {"role": "system", "content": "You say hi. " * 8}


def test_the_context_is_the_limit(hello: Live) -> None:
    hello.post(CHAT_PATH, CHAT | {"messages": [SYSTEM, *CHAT["messages"]]})
    hello.post(CHAT_PATH, CHAT | {"max_tokens": 5000})
    free, limited = (stream.request for stream in hello.service.streams)
    assert free.max_tokens == 512 - len(free.prompt)
    assert limited.max_tokens == 512


def told(live: Live, **headers: str) -> list[Any]:
    """Return the chunks of an answer in three steps, one of them drafted."""
    live.service.answer = None
    options: dict[str, Any] = {"rest_local": {"origins": True}, "logprobs": True}
    with live.client(headers=headers) as client, client.stream("POST", CHAT_PATH, json=CHAT | options) as answer:
        stream = live.service.stream()
        stream.give("one ")
        entry = TokenLogprobs(5, -0.5, ())
        stream.give("two", "datastore", origin=origin(), logprobs=(entry,))
        stream.give(" three" * 20)
        stream.end("stop")
        return data_of(answer.read().decode())


def test_origins_of_tokens_are_sent_on_request(hello: Live) -> None:
    found = told(hello)
    tokens = [token for chunk in found for token in chunk.get("rest_local", {}).get("tokens", [])]
    drafted = [token for token in tokens if token["source"] == "datastore"]
    keys = {"text", "token", "source", "file", "line", "match", "probability"}
    assert all(token.keys() == keys for token in tokens)
    assert {(token["file"], token["line"], token["match"]) for token in drafted} == {("a.py", 3, 4)}
    assert "".join(token["text"] for token in tokens) == "one two" + " three" * 20
    logprobs = [each for chunk in found if (each := chunk["choices"][0]["logprobs"])]
    assert [entry["logprob"] for each in logprobs for entry in each["content"]] == [-0.5]
    assert found[-1]["rest_local"]["draft"]


def test_other_machines_see_neither_steps_nor_drafts(scripted: Scripted) -> None:
    live = scripted(host="0.0.0.0", keys=(b"k",), metrics=True)
    found = told(live, authorization="Bearer k")
    assert all("rest_local" not in chunk for chunk in found)
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in found][1:-1]
    assert "".join(contents) == "one two" + " three" * 20
    assert all(len(content) % 64 == 0 for content in contents[:-1]), "cut at fixed places"
    assert len(contents) > 1
    assert "draft_n" not in found[-1]["timings"]
    metrics = live.get("/metrics", headers={"x-api-key": "k"}).text
    assert "spec_decode" not in metrics
    assert "kv_cache" not in metrics
    assert all("n_past" not in slot for slot in live.get("/slots", headers={"x-api-key": "k"}).json())


def test_other_machines_see_steps_with_share_statistics(scripted: Scripted) -> None:
    live = scripted(host="0.0.0.0", keys=(b"k",), statistics=True)
    found = told(live, authorization="Bearer k")
    assert any("rest_local" in chunk for chunk in found)
    assert "draft_n" in found[-1]["timings"]


# ---- The progress of a prompt --------------------------------------------------------------------------------------


LONG = "def add(a, b):\n    return a + b\n\n" * 50  # more than a batch of 512 tokens
CALLS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": LONG, "n_predict": 4},
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
}
WANTED = {"stream": True, "return_progress": True, "rest_local": {"policy": "off"}}


def asked(live: Live, path: str, **more: Any) -> list[Any]:
    answer = live.post(path, CALLS[path] | WANTED | more)
    assert answer.status_code == 200, answer.text
    return data_of(answer.text)


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_tells_how_much_of_its_prompt_is_evaluated_and_times(demo: Live, path: str) -> None:
    events = asked(demo, path, cache_prompt=False, timings_per_token=True)
    found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [list(each) for each in found] == [["total", "cache", "processed", "time_ms"]] * len(found)
    assert (found[0]["cache"], found[0]["processed"], found[0]["time_ms"]) == (0, 0, 0)
    assert len({each["total"] for each in found}) == 1
    assert len(found) >= 3, "the prompt is longer than a batch"
    done = [each["processed"] for each in found]
    assert done == sorted(set(done))
    assert done[-1] == found[-1]["total"] > 512
    times = [each["time_ms"] for each in found]
    assert times == sorted(times)
    assert times[-1] > 0
    first, *others = [event["timings"] for event in events if "prompt_progress" in event]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"], first["predicted_ms"]) == (0, 0, 0, 0)
    assert [each["prompt_n"] for each in others] == sorted(each["prompt_n"] for each in others)
    assert others[-1]["prompt_ms"] > 0
    parts = [each for each in events if "prompt_progress" not in each and "timings" in each]
    counts = [each["timings"]["predicted_n"] for each in parts]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert sum("timings" in each for each in asked(demo, path)) <= 1, "unasked at the end only"


def test_progress_begins_with_what_was_in_memory(demo: Live) -> None:
    asked(demo, "/completion")
    (first, *_, last) = [each["prompt_progress"] for each in asked(demo, "/completion") if "prompt_progress" in each]
    assert first["cache"] == first["processed"] == first["total"] - 1, "the last token is always evaluated"
    assert last["processed"] == last["total"]
    assert last["cache"] == first["cache"]


def test_nothing_is_told_unasked(demo: Live) -> None:
    assert not any("prompt_progress" in each for each in asked(demo, "/completion", return_progress=False))
    whole = demo.post("/completion", CALLS["/completion"] | WANTED | {"stream": False}).json()
    assert "prompt_progress" not in whole


def test_other_machines_are_told_neither(scripted: Callable[..., Live]) -> None:
    """How much of a prompt was in memory tells what another client sent."""
    live = scripted(host="127.0.0.1", keys=(b"k",), allowed_hosts=("models.example",), answer=None)
    body = CALLS["/completion"] | WANTED | {"timings_per_token": True, "prompt": "x"}
    with (
        live.client(headers={"authorization": "Bearer k"}) as client,
        client.stream("POST", "/completion", json=body) as answer,
    ):
        stream = live.service.stream()
        stream._pieces.append(Piece("", (), (), progress=Progress(9, 4, 1.0, Timings(cached_tokens=4))))
        stream.give("text")
        stream.end()
        found = data_of("".join(answer.iter_text()))
    assert found[-1]["stop"]
    assert not any("prompt_progress" in each for each in found)
    assert not any("timings" in each for each in found[:-1])
