"""Editors: the requests of `recorded.OPENAI`, and of each answer what that editor's source reads."""

import json
from typing import Any

import pytest
from live import Live, Scripted, data_of, prompt_of
from recorded import GAP, OPENAI, ZED_STOPS, Recorded

SHOWN = ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second")


def send(live: Live, request: Recorded, **changes: Any) -> Any:
    answer = live.post(request.path, request.body | changes, headers=request.headers)
    assert answer.status_code == 200, answer.text
    return answer


def words(live: Live, request: Recorded, **changes: Any) -> str:
    """Return the text of a streamed chat, read as llama.vim and llama.vscode do."""
    choices = [event["choices"][0] for event in data_of(send(live, request, **changes).text) if event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_llama_vim_shows_what_fills_the_gap(demo: Live) -> None:
    answer = send(demo, OPENAI["VIM_INFILL"])
    assert answer.text.lstrip().startswith(("{", "["))
    assert '"content":"' in answer.text, "it looks for this before it parses"
    found = answer.json()
    assert found.keys() == set(OPENAI["VIM_INFILL"].body["response_fields"]), "it asks for nothing that is not there"
    assert all(isinstance(found[f"timings/{name}"], (int, float)) for name in SHOWN)
    assert found["truncated"] is False
    assert found["tokens_cached"] > 20


def test_llama_vim_warms_up_the_whole_of_its_context(demo: Live) -> None:
    """Its limit on that prompt is 1 ms; what it warms has to be there all the same."""
    text = "\n".join(f"value_{number} = {number} * {number + 1}" for number in range(60))
    extra = [{"text": text, "filename": "values.py", "time": [1763, 5]}]
    assert send(demo, OPENAI["VIM_INFILL_WARM_UP"], input_extra=extra).json() == {}
    timings = send(demo, OPENAI["VIM_INFILL"], input_extra=extra, response_fields=["timings"]).json()["timings"]
    assert timings["cache_n"] > 500
    assert timings["prompt_n"] < 100


def test_llama_vim_edits_after_a_warm_up(hello: Live) -> None:
    warm = send(hello, OPENAI["VIM_EDIT_WARM_UP"]).json()
    assert warm["choices"][0]["message"]["content"] == ""
    assert hello.service.stream().request.max_tokens == 0
    assert words(hello, OPENAI["VIM_EDIT"]) == "Hello world"
    sampling = hello.service.stream(1).request.sampling
    assert (sampling.min_p, sampling.temperature, sampling.top_k, sampling.top_p) == (0.1, 0.1, 0, 1.0)


def test_llama_vscode_shows_what_fills_the_gap(demo: Live) -> None:
    found = send(demo, OPENAI["VSCODE_INFILL"]).json()
    assert isinstance(found["content"], str)
    assert all(isinstance(found["timings"][name], (int, float)) for name in SHOWN)
    assert isinstance(found["tokens_cached"], int)
    assert found["truncated"] is False
    assert found["generation_settings"]["top_p"] == 0.99
    assert send(demo, OPENAI["VSCODE_WARM_UP"]).json()["content"] == ""


def test_llama_vscode_counts_tokens_before_its_request(demo: Live) -> None:
    """Its agent asks for the model, its context, the prompt of the conversation and the tokens of that."""
    models = demo.get("/v1/models").json()["data"]
    matched = next(model for model in models if model["id"] == "coder")
    assert isinstance(matched["meta"], dict), "by this it knows a llama.cpp server"
    props = demo.get("/props?model=coder&autoload=false").json()
    assert props["default_generation_settings"]["n_ctx"] == matched["meta"]["n_ctx"] == 2048
    body = {name: OPENAI["VSCODE_AGENT"].body[name] for name in ("messages", "model", "tools", "tool_choice")}
    prompt = demo.post("/apply-template", body).json()["prompt"]
    assert "x = 1" in prompt
    tokens = demo.post("/tokenize", {"content": prompt, "add_special": False, "parse_special": True}).json()["tokens"]
    usage = data_of(send(demo, OPENAI["VSCODE_AGENT"], max_tokens=1).text)[-1]["usage"]
    assert abs(len(tokens) - usage["prompt_tokens"]) <= 1


def agents_call(live: Live, request: Recorded) -> tuple[str, list[dict[str, Any]], str | None, dict[str, Any]]:
    """Return text, calls, reason and usage, put together from the deltas as llama.vscode, Zed, Cline and Roo do."""
    text, calls, reason, usage = "", [], None, {}
    for event in data_of(send(live, request).text):
        assert (event["model"], event["object"]) == ("coder", "chat.completion.chunk"), "Zed refuses others"
        usage = event.get("usage") or usage
        if not event["choices"]:
            continue
        choice = event["choices"][0]
        assert {"index", "finish_reason"} <= choice.keys()
        reason = choice["finish_reason"] or reason
        text += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls") or ():
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"].get("arguments") or ""
    return text, calls, reason, usage


AGENTS = (OPENAI["VSCODE_AGENT"], OPENAI["ZED_CHAT"], OPENAI["CLINE_CHAT"], OPENAI["ROO_CHAT"])


@pytest.mark.parametrize("request_", AGENTS, ids=lambda request: request.client)
def test_agents_read_a_call(scripted: Scripted, request_: Recorded) -> None:
    live = scripted(aliases=("coder",))
    live.service.answer = (
        "I read",
        ' it.\n<tool_call>\n{"name": "read_file", "arg',
        'uments": {"path": "b.py"}}\n</tool',
    )
    live.service.answer += ("_call>",)
    text, calls, reason, usage = agents_call(live, request_)
    assert text.strip() == "I read it."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("read_file", {"path": "b.py"})]
    assert calls[0]["id"]
    assert reason == "tool_calls"
    assert usage.keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert "read_file" in prompt_of(live), "the tools are in the prompt although the template knows none"


def test_zed_reads_the_models_properties(demo: Live) -> None:
    (first, _) = demo.get("/v1/models", headers={"accept": "application/json"}).json()["data"]
    assert first["meta"]["n_ctx"] == first["meta"]["n_ctx_train"] == 2048
    assert "status" not in first, "that would make it a router of many models, with a stream of events at /models/sse"
    props = demo.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["modalities"]["vision"] is False
    caps = props["chat_template_caps"]
    assert isinstance(caps["supports_tools"], bool)
    assert isinstance(caps["supports_tool_calls"], bool)


def test_zed_predicts_edits(demo: Live) -> None:
    found = send(demo, OPENAI["ZED_EDIT_PREDICTION"]).json()
    assert found["id"]
    text = found["choices"][0]["text"]
    assert not any(stop in text for stop in ZED_STOPS)
    assert found["usage"]["prompt_tokens"] < len(GAP) // 2, "the special tokens were parsed"


def test_continue_completes_by_llama_cpps_own_call(demo: Live) -> None:
    found = data_of(send(demo, OPENAI["CONTINUE_LLAMA_CPP"]).text)
    assert "".join(event["content"] for event in found if event["content"])
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["tokens_evaluated"] < 60, "the special tokens were parsed"


def test_continue_predicts_where_the_name_is_one_it_knows(scripted: Scripted) -> None:
    live = scripted(aliases=("gpt-4o-mini",))
    assert words(live, OPENAI["CONTINUE_OPENAI"]) == "Hello world"
    request = live.service.stream().request
    vocabulary = live.service.engine.model.vocabulary
    predicted = b"".join(vocabulary.piece(token) for token in request.prediction).decode()
    assert predicted == OPENAI["CONTINUE_OPENAI"].body["prediction"]["content"]
    assert request.stop == ("```",)


def test_open_webui_lists_and_chats(demo: Live) -> None:
    headers = {"authorization": "Bearer none"}
    assert "coder" in [model["id"] for model in demo.get("/v1/models", headers=headers).json()["data"]]
    answer = send(demo, OPENAI["WEBUI_CHAT"])
    assert answer.headers["content-type"].startswith("text/event-stream"), "by this it knows a stream"
    assert answer.text.endswith("data: [DONE]\n\n")
