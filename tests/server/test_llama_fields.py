"""Fields and calls that llama-server's clients use."""

import json
import math
from typing import Any

import pytest
from live import Live

PROMPT: dict[str, Any] = {"prompt": "def add(a, b):\n", "n_predict": 6, "seed": 7, "rest_local": {"policy": "off"}}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a function."}]}


def completed(live: Live, **more: Any) -> Any:
    answer = live.post("/completion", PROMPT | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_probabilities_after_the_samplers(demo: Live) -> None:
    wanted = {"n_probs": 10, "post_sampling_probs": True, "temperature": 1.0, "cache_prompt": False}
    found = completed(demo, **wanted, top_k=3, min_p=0)["completion_probabilities"]
    assert len(found) == 6
    for entry in found:
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        chances = [each["prob"] for each in entry["top_probs"]]
        assert 1 <= len(chances) <= 3
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1.0)
        assert {each["id"]: each["prob"] for each in entry["top_probs"]}[entry["id"]] == entry["prob"] > 0
    lines = demo.post("/completion", PROMPT | wanted | {"top_k": 3, "min_p": 0, "stream": True}).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [each for part in parts for each in part.get("completion_probabilities", [])] == found


def test_probabilities_after_samplers_that_leave_one(demo: Live) -> None:
    for more in ({"temperature": 0}, {"temperature": 0.8, "top_k": 1}, {"temperature": 0, "repeat_penalty": 1.1}):
        found = completed(demo, n_probs=5, post_sampling_probs=True, **more)["completion_probabilities"]
        assert [entry["prob"] for entry in found] == [1.0] * 6
        assert all([each["id"] for each in entry["top_probs"]] == [entry["id"]] for entry in found)


def test_probabilities_after_the_samplers_are_those_of_the_model_at_temperature_1(demo: Live) -> None:
    off = {"samplers": ["temperature"], "temperature": 1.0, "n_probs": 4, "cache_prompt": False}
    after = completed(demo, **off, post_sampling_probs=True)["completion_probabilities"]
    before = completed(demo, **off)["completion_probabilities"]
    assert [entry["id"] for entry in after] == [entry["id"] for entry in before]
    for mine, models in zip(after, before, strict=True):
        assert mine["prob"] == pytest.approx(math.exp(models["logprob"]), rel=1e-4)
        assert [each["id"] for each in mine["top_probs"]] == [each["id"] for each in models["top_logprobs"]]


@pytest.mark.parametrize("named", [False, True], ids=["pairs", "object"])
def test_biases_of_text(demo: Live, named: bool) -> None:
    greedy = {"temperature": 0, "cache_prompt": False}
    first = completed(demo, **greedy, return_tokens=True)["content"]
    words = [word for word in first.split() if word.isidentifier()]
    assert words
    pairs: list[Any] = [[f" {words[0]}", -100], [words[0], -100]]
    biased = completed(demo, **greedy, logit_bias=dict(pairs) if named else pairs)
    assert words[0] not in biased["content"].split()
    ids = demo.post("/tokenize", {"content": f" {words[0]}"}).json()["tokens"]
    assert {each["token"] for each in biased["generation_settings"]["logit_bias"]} >= set(ids)


def test_prompts_as_objects(demo: Live) -> None:
    greedy = {"temperature": 0, "cache_prompt": False}
    text = completed(demo, **greedy)["content"]
    ids = demo.post("/tokenize", {"content": PROMPT["prompt"]}).json()["tokens"]
    for prompt in ({"prompt_string": PROMPT["prompt"]}, {"content": [{"type": "text", "text": PROMPT["prompt"]}]}):
        assert completed(demo, **greedy, prompt=prompt)["content"] == text
    both = completed(demo, **greedy, prompt=[ids, {"prompt_string": PROMPT["prompt"]}])
    assert [each["prompt"] for each in both] == [PROMPT["prompt"]] * 2


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_string": "x <__media__>", "multimodal_data": ["iVBORw0K"]},
        {"prompt_string": 1},
        {"content": "x"},
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {},
    ],
)
def test_other_objects_are_no_prompts(demo: Live, prompt: Any) -> None:
    for path, field in (("/completion", "prompt"), ("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        answer = demo.post(path, {field: prompt})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"])
def test_the_tokens_of_a_chat_are_counted(demo: Live, path: str) -> None:
    counted = demo.post(path, CHAT).json()
    usage = demo.post("/v1/chat/completions", CHAT | {"max_tokens": 1}).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


def test_an_ignored_end_is_among_the_biases_in_effect(demo: Live) -> None:
    settings = completed(demo, ignore_eos=True)["generation_settings"]
    assert settings["logit_bias"]
    assert all(each["bias"] is None for each in settings["logit_bias"]), "minus infinity"
    assert completed(demo, ignore_eos=False)["generation_settings"]["logit_bias"] == []


def metrics_of(live: Live) -> dict[str, float]:
    answer = live.get("/metrics")
    assert float(answer.headers["process-start-time-unix"]) > 1.7e9
    types: dict[str, str] = {}
    found: dict[str, float] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, types[name] = line.split(" ")
        elif not line.startswith("#"):
            name, value = line.split(" ")
            assert types[name] == ("counter" if name.endswith(("_total", "n_tokens_max")) else "gauge")
            found[name] = float(value)
    return found


def test_metrics_count_what_was_in_memory_and_what_was_evaluated(demo: Live) -> None:
    before, evaluated, cached = metrics_of(demo), 0, 0
    for _ in range(2):
        timings = completed(demo, prompt="class Fox:\n    def jump(self, over):\n")["timings"]
        evaluated, cached = evaluated + timings["prompt_n"], cached + timings["cache_n"]
    after = metrics_of(demo)

    def grown(name: str) -> float:
        return after[f"llamacpp:{name}"] - before[f"llamacpp:{name}"]

    assert cached > 0
    assert grown("prompt_tokens_total") == evaluated
    assert grown("prompt_tokens_cached_total") == cached
    assert grown("tokens_predicted_total") == grown("n_decode_total") == 12
    assert after["llamacpp:n_tokens_max"] >= (evaluated + cached) / 2 + 6
    assert 0 < after["llamacpp:n_busy_slots_per_decode"] <= 4
    drafts = (f"spec_decode_{name}_total" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    for name in ("predicted_tokens_seconds", "requests_processing", "requests_deferred", *drafts):
        assert f"llamacpp:{name}" in after
