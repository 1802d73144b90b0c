"""llama-server's own calls, against the demo model."""

from typing import Any

import pytest
from live import Live, data_of

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


def test_the_time_limit_of_a_prompt_counts_only_in_rest_local(demo: Live) -> None:
    """llama-server ignores it elsewhere, and llama.vim would keep an empty answer."""
    long = PROMPT | {"prompt": "x = 1\n" * 100, "t_max_prompt_ms": 0.001}
    assert demo.post("/completion", long).json()["tokens_predicted"] == 12
    ours = demo.post("/completion", long | {"rest_local": {"t_max_prompt_ms": 0.001}}).json()
    assert (ours["tokens_predicted"], ours["stop_type"]) == (0, "limit")


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
    """As in llama-server: a list of texts is several prompts; texts mixed with ids are one."""
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


def test_stop_strings_may_be_many(demo: Live) -> None:
    full = demo.post("/completion", PROMPT).json()["content"]
    many = [f"never said {number}" for number in range(5000)]
    cut = demo.post("/completion", PROMPT | {"stop": [*many, full[4:8]]}).json()
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", full[4:8])
    assert cut["content"] == full[: full.index(full[4:8])]
