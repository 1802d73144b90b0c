"""llama-server's own calls, against the demo model."""

from typing import Any

import pytest
from live import Live, Scripted, data_of

from rest_local.llama.options import SAMPLERS

# Two runs give the same bits only in the same batches: alone, not drafted, evaluated whole.
SAME = {"cache_prompt": False, "ignore_eos": True, "rest_local": {"policy": "off"}}
PROMPT = SAME | {"prompt": "def add(a, b):\n", "n_predict": 12, "temperature": 0}


def test_a_completion_and_its_stream_have_the_same_text(demo: Live) -> None:
    whole = demo.post("/completion", PROMPT | {"return_tokens": True}).json()
    parts = data_of(demo.post("/completion", PROMPT | {"stream": True}).text)
    assert "".join(part["content"] for part in parts) == whole["content"] != ""
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert len(whole["tokens"]) == whole["tokens_predicted"] == 12
    wanted = "content tokens stop stop_type stopping_word generation_settings model prompt timings tokens_cached"
    assert {*wanted.split(), "tokens_evaluated", "truncated"} <= whole.keys()
    assert whole["stop_type"] == "limit"
    assert whole["prompt"] == PROMPT["prompt"]
    assert whole["timings"]["predicted_n"] == 12


def test_response_fields_are_flat(demo: Live) -> None:
    fields = ["content", "timings/prompt_n", "timings/nothing", "generation_settings/n_ctx", "truncated"]
    found = demo.post("/completion", PROMPT | {"response_fields": fields}).json()
    assert list(found) == ["content", "timings/prompt_n", "generation_settings/n_ctx", "truncated"]
    assert found["generation_settings/n_ctx"] == 2048
    *parts, last = data_of(demo.post("/completion", PROMPT | {"stream": True, "response_fields": fields}).text)
    assert list(last) == list(found)
    assert all(part["content"] for part in parts), "the text is what a stream is for"


def test_the_time_limit_of_a_prompt_is_ignored(demo: Live) -> None:
    """llama-server does so too, and llama.vim would keep an empty answer."""
    long = PROMPT | {"prompt": "x = 1\n" * 100, "t_max_prompt_ms": 0.001}
    assert demo.post("/completion", long).json()["tokens_predicted"] == 12


@pytest.mark.parametrize(("n", "full"), [(7, False), (8, True)])
def test_an_answer_that_fills_the_context_is_truncated(scripted: Scripted, n: int, full: bool) -> None:
    live = scripted(n_ctx=16, answer=None)
    asked = live.later("/completion", {"prompt": [5] * 8})
    for _ in range(n):
        live.service.stream().give("x")
    live.service.stream().end("length")
    answer = asked.result(30).json()
    assert (answer["tokens_predicted"], answer["truncated"]) == (n, full)


def test_prompts_of_ids_and_texts(demo: Live) -> None:
    ids = demo.post("/tokenize", {"content": "def add"}).json()["tokens"]
    mixed = demo.post("/completion", PROMPT | {"prompt": [*ids, "(a, b):\n"]}).json()
    assert mixed["prompt"] == PROMPT["prompt"]
    assert demo.post("/completion", PROMPT | {"prompt": [5000]}).status_code == 400
    wrong: list[list[Any]] = [[1, [2, 3]], ["x", 1, [2]], [[1], 2]]
    for prompt in wrong:  # one prompt, or several?
        answer = demo.post("/completion", PROMPT | {"prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("text", ["", "def f():\n    return 1\n", "né 中 🙂", "<|im_start|>user"])
def test_text_survives_tokenize_and_detokenize(demo: Live, text: str) -> None:
    tokens = demo.post("/tokenize", {"content": text}).json()["tokens"]
    assert demo.post("/detokenize", {"tokens": tokens}).json() == {"content": text}
    pieces = demo.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    raw = b"".join(p.encode() if isinstance(p := piece["piece"], str) else bytes(p) for piece in pieces)
    assert raw.decode() == text


def test_special_tokens_are_parsed_by_default(demo: Live) -> None:
    as_special = demo.post("/tokenize", {"content": "<|im_start|>"}).json()["tokens"]
    as_text = demo.post("/tokenize", {"content": "<|im_start|>", "parse_special": False}).json()["tokens"]
    assert len(as_special) == 1 < len(as_text)
    assert demo.post("/detokenize", {"tokens": [4096]}).status_code == 400


def test_the_template_is_applied(demo: Live) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    text = demo.post("/apply-template", body).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    without = demo.post("/apply-template", body | {"add_generation_prompt": False}).json()["prompt"]
    assert text == without + "<|im_start|>assistant\n"


def test_props_slots_and_models_describe_the_server(demo: Live) -> None:
    assert demo.get("/health").json() == {"status": "ok"}
    props = demo.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["total_slots"] == 4
    assert isinstance(props["chat_template_caps"], dict)
    assert props["chat_template"]
    assert "/" not in props["model_path"]
    slots = demo.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert all(slot["is_processing"] == (slot["state"] != "idle") for slot in slots)


def test_metrics_are_off_by_default(hello: Live) -> None:
    assert hello.get("/metrics").status_code == 501


def test_each_of_several_prompts_is_answered(demo: Live) -> None:
    """A list of texts is several prompts, and texts mixed with ids are one, as in llama-server."""
    alone = [demo.post("/completion", PROMPT | {"prompt": text}).json() for text in ("def add(", "import os\n")]
    ids = demo.post("/tokenize", {"content": "import os"}).json()["tokens"]
    both = demo.post("/completion", PROMPT | {"prompt": ["def add(", [*ids, "\n"]]}).json()
    assert [each["prompt"] for each in both] == ["def add(", "import os\n"]
    assert [each["index"] for each in both] == [0, 1]
    assert [len(each["content"]) > 0 for each in both] == [True, True]
    assert demo.post("/completion", PROMPT | {"prompt": ["def add("]}).json()["prompt"] == alone[0]["prompt"]
    parts = data_of(demo.post("/completion", PROMPT | {"prompt": ["def add(", "import os\n"], "stream": True}).text)
    last = [part for part in parts if part["stop"]]
    assert sorted((part["index"], part["prompt"]) for part in last) == [(0, "def add("), (1, "import os\n")]
    for number in (0, 1):
        assert sum(len(part["tokens"]) for part in parts if part["index"] == number) == 12


def test_generation_settings_are_those_in_effect(demo: Live) -> None:
    found = demo.post("/completion", {"prompt": "x", "n_predict": 1}).json()["generation_settings"]
    assert (found["temperature"], found["top_k"], found["top_p"], found["min_p"]) == (0.8, 40, 0.95, 0.05)
    assert (found["n_predict"], found["seed"], found["stop"]) == (1, -1, [])
    body = {"prompt": "x", "n_predict": 2, "samplers": ["top_k"], "top_k": 5, "top_p": 0.5, "temperature": 0.3}
    more = {"seed": 7, "stop": ["a", "b"], "repeat_penalty": 1.5}
    found = demo.post("/completion", body | more).json()["generation_settings"]
    assert (found["top_k"], found["top_p"], found["temperature"], found["repeat_penalty"]) == (5, 1.0, 1.0, 1.0)
    assert (found["n_predict"], found["seed"], found["stop"]) == (2, 7, ["a", "b"])


def test_every_sampler_of_llama_server_is_offered_and_reported(demo: Live) -> None:
    given = {
        "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0, "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 3,
        "dry_penalty_last_n": -1, "dry_sequence_breakers": [";"], "min_keep": 2, "adaptive_target": 0.5,
        "adaptive_decay": 0.5,
    }  # fmt: skip
    found = demo.post("/completion", {"prompt": "x", "n_predict": 1} | given).json()["generation_settings"]
    assert {name: found[name] for name in given} == given
    assert found["samplers"] == list(SAMPLERS)
    given = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5}
    found = demo.post("/completion", {"prompt": "x", "n_predict": 1} | given).json()["generation_settings"]
    assert {name: found[name] for name in given} == given
    assert (found["samplers"], found["top_k"]) == (["temperature"], 0)
    ordered = {"prompt": "x", "n_predict": 1, "samplers": "tk"}
    found = demo.post("/completion", ordered).json()["generation_settings"]
    assert (found["samplers"], found["min_p"]) == (["temperature", "top_k"], 0.0)
    shown = demo.get("/props").json()["default_generation_settings"]["params"]
    assert (shown["temperature"], shown["dry_multiplier"], shown["mirostat"]) == (0.8, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "wrong", "neutral"),
    [("tfs_z", 0.5, 1.0), ("top_a", 0.1, 0), ("bad_words", ["x"], []), ("use_beam_search", True, False),
     ("logits_processors", ["x"], None), ("length_penalty", 0.5, 1.0), ("allowed_token_ids", [5], []),
     ("guided_json", {"enum": [17]}, None), ("structured_outputs", {"choice": ["a"]}, {})],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_and_is_unknown_is_refused(
    demo: Live, name: str, wrong: Any, neutral: Any
) -> None:
    answer = demo.post("/completion", PROMPT | {name: wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert demo.post("/completion", PROMPT | {name: neutral}).status_code == 200


def test_the_penalty_of_vllm_counts_the_whole_text(demo: Live) -> None:
    settings = demo.post("/completion", PROMPT | {"repetition_penalty": 1.25}).json()["generation_settings"]
    assert (settings["repeat_penalty"], settings["repeat_last_n"]) == (1.25, -1)


def test_an_answer_ends_before_a_token_that_is_named(demo: Live) -> None:
    whole = demo.post("/completion", PROMPT | {"return_tokens": True}).json()
    stop = whole["tokens"][5]
    cut = demo.post("/completion", PROMPT | {"return_tokens": True, "stop_token_ids": [stop]}).json()
    assert cut["tokens"] == whole["tokens"][: whole["tokens"].index(stop)]
    assert cut["stop_type"] == "eos"


def test_stop_strings_may_be_many(demo: Live) -> None:
    full = demo.post("/completion", PROMPT).json()["content"]
    many = [f"never said {number}" for number in range(5000)]
    cut = demo.post("/completion", PROMPT | {"stop": [*many, full[4:8]]}).json()
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", full[4:8])
    assert cut["content"] == full[: full.index(full[4:8])]


# ---- Fields and calls that llama-server's clients use --------------------------------------------------------------


ADD: dict[str, Any] = {"prompt": "def add(a, b):\n", "n_predict": 6, "seed": 7, "rest_local": {"policy": "off"}}
BRIEF = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a function."}]}


def completed(live: Live, **more: Any) -> Any:
    answer = live.post("/completion", ADD | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


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


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_string": "x"},
        {},
    ],
)
def test_other_objects_are_no_prompts(demo: Live, prompt: Any) -> None:
    for path, field in (("/completion", "prompt"), ("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        answer = demo.post(path, {field: prompt})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == field


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
