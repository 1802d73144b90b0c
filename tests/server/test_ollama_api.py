"""Ollama's API: what its fields mean here, what is told to other machines, and what is refused."""

import base64
import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from live import Live, Scripted

from rest_local.api.errors import ApiError
from rest_local.api.models import Row, counted, find_name, quantization, running, tagged, tags
from rest_local.api.ollama import GenerateBody, OllamaChatBody, chat_body, chat_messages, prompt_messages
from rest_local.decoding.verify import Relaxed
from rest_local.llama.sampling_defaults import SamplingDefaults

HELLO = [{"role": "user", "content": "Hello"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
KEY = {"x-api-key": "k"}


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    body = OllamaChatBody.model_validate({"messages": list(given)})
    return [message.model_dump(exclude_none=True) for message in chat_messages(body)]


def test_options_reach_the_sampler(hello: Live) -> None:
    options = {"temperature": 0.3, "top_k": 7.0, "top_p": 0.8, "min_p": 0.1, "seed": 5, "stop": "end"}
    options |= {"repeat_penalty": 1.2, "repeat_last_n": 16, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    options |= {"num_predict": 9}
    hello.post("/api/chat", {"messages": HELLO, "options": options, "stream": False})
    request = hello.service.stream().request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.3, 7, 0.8, 0.1)
    assert (sampling.seed, sampling.repeat_penalty, sampling.repeat_last_n) == (5, 1.2, 16)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert (request.stop, request.max_tokens) == (("end",), 9)


def test_what_the_request_leaves_open_comes_from_the_options_of_the_server(scripted: Scripted) -> None:
    """Zed asks for predictions of edits without a temperature."""
    live = scripted()
    live.service.engine.sampling = SamplingDefaults({"temperature": 0.0, "seed": 5}, {"top_k": 7, "top_p": 0.5})
    live.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "n": 2})
    live.post("/api/generate", {"prompt": "x", "options": {"temperature": 0.25, "mirostat": 1, "mirostat_tau": 3.0}})
    live.post("/v1/messages", {"max_tokens": 3, "messages": HELLO, "top_k": 3})
    first, second, ollama, messages = (live.service.stream(number).request.sampling for number in range(4))
    assert (first.temperature, first.top_k, first.top_p, first.seed, second.seed) == (0.0, 7, 0.5, 5, 6)
    assert (ollama.temperature, ollama.mirostat, ollama.mirostat_tau) == (0.25, 1, 3.0)
    assert (messages.temperature, messages.top_k, messages.top_p) == (0.0, 3, 0.5)
    shown = live.get("/props").json()["default_generation_settings"]["params"]
    assert (shown["temperature"], shown["top_k"], shown["seed"]) == (0.0, 7, 5)


def test_fields_of_this_server_alone(scripted: Scripted) -> None:
    live = scripted()
    own = {"rest_local": {"policy": "off", "verify": "relaxed"}, "datastore": []}
    for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "x", "raw": True})):
        live.post(path, body | own)
    for number in (0, 1):
        request = live.service.stream(number).request
        assert (request.policy, request.verify, request.datastores) == ("off", Relaxed(), ())


def test_thinking_is_switched_by_the_names_that_templates_know() -> None:
    def variables(think: Any) -> Any:
        body = GenerateBody.model_validate({"prompt": "x", "think": think})
        return chat_body(body, prompt_messages(body), None).chat_template_kwargs

    assert variables(None) is None
    assert variables(False) == {"enable_thinking": False, "thinking": False}
    assert variables("low") == {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}


def test_results_get_the_ids_of_their_calls() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"n": 1}}} | more

    found = messages(
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call("a"), call("b"), call("c", id="own")]},
        {"role": "tool", "tool_name": "b", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "3"},
        {"role": "tool", "content": "no call is left"},
    )
    assert [each["id"] for each in found[1]["tool_calls"]] == ["call_1_0", "call_1_1", "own"]
    assert [each.get("tool_call_id") for each in found[2:]] == ["call_1_1", "call_1_0", "own", None]
    assert [each.get("name") for each in found[2:]] == ["b", "a", "c", None]


def test_images_become_parts_and_others_are_refused() -> None:
    (found,) = messages({"role": "user", "content": "What is this?", "images": [PNG]})
    assert found["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    for image in ("no base64!", "http://127.0.0.1/x.png"):
        with pytest.raises(ApiError) as caught:
            messages({"role": "user", "content": "x"}, {"role": "user", "content": "y", "images": [PNG, image]})
        assert caught.value.status == 400
        assert caught.value.message.startswith("messages[1].images[1]:")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": "x"}, "messages"),
        ("/api/chat", {"messages": HELLO, "options": {"top_k": 1.5}}, "options.top_k"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools[0]"),
        ("/api/chat", {"messages": HELLO, "format": "xml"}, "format"),
        ("/api/generate", {"prompt": 5}, "prompt"),
        ("/api/generate", {"prompt": "x", "context": [10**9]}, "token ids"),
        ("/api/generate", {"prompt": "x", "raw": True, "images": [PNG]}, "images"),
        ("/api/generate", {"prompt": "x", "options": {"top_p": 7}}, "top_p"),
        ("/api/embed", {}, "input"),
        ("/api/show", {}, "name"),
    ],
)
def test_bad_input_is_400_in_the_shape_of_ollama(hello: Live, path: str, body: dict[str, Any], field: str) -> None:
    answer = hello.post(path, body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}
    assert field in answer.json()["error"]


def test_errors_of_the_server_have_the_shape_too(scripted: Scripted) -> None:
    live = scripted(keys=(b"k",), max_body=1000)
    assert live.post("/api/chat", {"messages": HELLO}).json().keys() == {"error"}
    assert isinstance(live.post("/api/chat", {"messages": HELLO}).json()["error"], str)
    large = live.post("/api/chat", {"messages": HELLO, "x": "y" * 2000}, headers=KEY)
    assert (large.status_code, large.json().keys()) == (413, {"error"})
    assert live.get("/api/nothing", headers=KEY).json() == {"error": "no such route"}


TYPES = ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8", None)


def test_programs_need_no_content_type_and_pages_of_other_sites_cannot_call(hello: Live) -> None:
    """The examples of Ollama's documentation name none. A page may send these types without asking the server."""
    content = json.dumps({"messages": HELLO}).encode()
    pages = [{"origin": "https://evil.example"}, {"origin": "null"}]
    pages += [{"sec-fetch-site": site} for site in ("cross-site", "same-site")]
    with hello.client() as client:
        for kind in TYPES:
            headers = {"content-type": kind} if kind else {}
            for page in pages:
                assert client.post("/api/chat", content=content, headers=page | headers).status_code in (403, 415)
            assert client.post("/v1/chat/completions", content=content, headers=headers).status_code == 415
        assert not hello.service.streams
        for kind in TYPES:
            headers = {"content-type": kind} if kind else {}
            assert client.post("/api/chat", content=content, headers=headers).status_code == 200


def test_pages_of_allowed_origins_can(scripted: Scripted) -> None:
    live = scripted(allowed_origins=("app://obsidian.md",))
    headers = {"origin": "app://obsidian.md", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    with live.client() as client:
        answer = client.post("/api/chat", content=json.dumps({"messages": HELLO}).encode(), headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "app://obsidian.md"


def test_other_machines_do_not_learn_what_was_in_memory(scripted: Scripted) -> None:
    def last(**settings: Any) -> dict[str, Any]:
        live = scripted(keys=(b"k",), **settings, answer=None)
        waiting = live.later("/api/chat", {"messages": HELLO, "stream": False}, headers=KEY)
        asked = live.service.stream()
        asked.timings = {"cached_tokens": 400, "prompt_tokens": 3, "prompt_ms": 1234.5, "predicted_ms": 163.0}
        asked.give("Hello")
        asked.end()
        return dict(waiting.result(60).json())

    near, far = last(), last(allowed_hosts=("proxy.example",))
    assert near["prompt_eval_count"] == far["prompt_eval_count"] == 403
    assert near["prompt_eval_duration"] == 1_234_500_000
    assert near["eval_duration"] == 163_000_000
    assert "prompt_eval_duration" not in far
    assert far["eval_duration"] == 200_000_000
    assert far["total_duration"] % 100_000_000 == 0


def test_log_probabilities(demo: Live) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 4}, "stream": False}
    whole = demo.post("/api/chat", body).json()["logprobs"]
    assert len(whole) == 4
    assert all(len(each["top_logprobs"]) == 2 and each["logprob"] <= 0 for each in whole)
    lines = [json.loads(line) for line in demo.post("/api/chat", body | {"stream": True}).text.splitlines()]
    assert sum(len(line.get("logprobs", ())) for line in lines) == 4


def test_the_page_stays_at_the_root_and_probes_succeed(demo: Live) -> None:
    with demo.client() as client:
        assert client.head("/").status_code == 200
        page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


def test_lists_are_made_of_rows() -> None:
    """A server of several models has rows of its own."""
    gone, known = Path("gone.gguf"), {"size": 10, "size_vram": 5, "n_params": 7_600_000_000}
    row = Row("org/coder:Q4_K_M", gone, known, is_loaded=True, expires=1e9)
    other = Row("small", gone, {}, is_loaded=False)
    listed = tags([row, other])["models"]
    assert [each["name"] for each in listed] == ["org/coder:Q4_K_M", "small:latest"]
    assert listed[0]["modified_at"] == "1970-01-01T00:00:00.000000Z"
    assert listed[0]["details"]["parameter_size"] == "7.6B"
    (loaded,) = running([row, other])["models"]
    assert (loaded["size_vram"], loaded["expires_at"]) == (5, "2001-09-09T01:46:40.000000Z")


def test_names() -> None:
    names = ["coder", "qwen:7b", "latest-one:latest"]
    assert find_name("coder", names) == find_name("coder:latest", names) == "coder"
    assert find_name("qwen:7b", names) == "qwen:7b"
    assert find_name("latest-one", names) == "latest-one:latest"
    assert find_name("qwen", names) is None
    assert (tagged("a"), tagged("a:b")) == ("a:latest", "a:b")


@pytest.mark.parametrize(
    ("description", "found"),
    [
        ("qwen2 7B Q4_K - Medium", "Q4_K_M"), ("llama ?B Q8_0", "Q8_0"), ("llama 1B all F32", "F32"),
        ("llama 8B IQ2_XXS - 2.0625 bpw", "IQ2_XXS"), ("gpt-oss 20B MXFP4 MoE", "MXFP4"), ("bert 33M F16", "F16"),
        ("unknown", ""),
    ],
)  # fmt: skip
def test_quantizations(description: str, found: str) -> None:
    assert quantization(description) == found


def test_numbers_of_parameters() -> None:
    assert [counted(n) for n in (0, 999, 22_500, 15_473_152, 7_615_616_512)] == ["0", "999", "22K", "15.47M", "7.6B"]


@pytest.mark.parametrize(("begins_turns", "starts"), [(True, 4), (False, 1)])
def test_a_later_turn_has_the_start_of_its_template_but_not_that_of_the_text(
    scripted: Scripted, begins_turns: bool, starts: int
) -> None:
    """SmolLM2 begins each turn with its start token, and adds none in front of a text."""
    live = scripted()
    model = live.service.engine.model
    (start,) = model.vocabulary.tokenize("<|im_start|>", special=True)
    turn = "{{ m.role }} {{ m.content }}"
    if begins_turns:
        model.chat_template = "{% for m in messages %}<|im_start|>" + turn + "{% endfor %}<|im_start|>"
    else:
        model.chat_template = "{{ bos_token }}{% for m in messages %}" + turn + "{% endfor %}"
    model.vocabulary = copy(model.vocabulary)
    model.vocabulary.ids = model.vocabulary.ids._replace(bos=int(start), add_bos=False)
    first = live.post("/api/generate", {"prompt": "a", "stream": False}).json()["context"]
    live.post("/api/generate", {"prompt": "b", "stream": False, "context": first})
    prompt = list(live.service.stream(1).request.prompt)
    assert prompt[: len(first)] == first
    assert prompt.count(int(start)) == starts
