"""Next edits: the requests of `recorded.NEXT_EDITS`, prompts that only look like one, and keystrokes in a row."""

from functools import partial
from typing import Any

import pytest
from live import Live, becomes_idle, sent, until
from recorded import NEXT_EDITS, Recorded

SWEEP = NEXT_EDITS["ZED_SWEEP"].body["prompt"]
FILE = "import math\n\n\ndef area(radius):\n    return math.pi * radius**\n\n\nprint(area(2))\n"
REGION = "def area(radius):\n    return math.pi * radius**\n\n"
ANSWERS = {
    "ZED_SWEEP": FILE,
    "ZED_ZETA": f"<|editable_region_start|>\n{REGION}<|editable_region_end|>",
    "ZED_ZETA_2": f"{REGION}\n>>>>>>> UPDATED\n",
    "ZED_ZETA_2_1": f"<|marker_1|>{REGION}\n<|marker_2|>",
    "CONTINUE_INSTINCT": f"{REGION}",
}


def predicted(live: Live, path: str, body: dict[str, Any]) -> tuple[str, float]:
    """Return the prediction and the temperature of the engine's request for this one."""
    assert live.post(path, body | {"model": None}).status_code == 200
    request, piece = live.service.stream().request, live.service.engine.model.vocabulary.piece
    return b"".join(piece(token) for token in request.prediction).decode(), request.sampling.temperature


@pytest.mark.parametrize("name", NEXT_EDITS)
def test_the_window_is_the_prediction_and_decoding_is_greedy(hello: Live, name: str) -> None:
    request = NEXT_EDITS[name]
    expected = request.body.get("temperature", 0.0)
    assert predicted(hello, request.path, request.body) == (ANSWERS[name], expected)


def test_other_calls_recognise_the_prompt_too(hello: Live) -> None:
    """Sweep's own extension calls /completion, Zed with Ollama /api/generate, and Continue's provider openai sends the
    last message alone to /v1/completions.
    """
    assert predicted(hello, "/completion", {"prompt": SWEEP}) == (FILE, 0.0)
    hello.service.forget(("Hello",))
    body = {"prompt": SWEEP, "raw": True, "stream": False, "options": {"temperature": 0.2}}
    assert predicted(hello, "/api/generate", body) == (FILE, 0.2)
    hello.service.forget(("Hello",))
    message = NEXT_EDITS["CONTINUE_INSTINCT"].body["messages"][-1]["content"]
    assert predicted(hello, "/v1/completions", {"prompt": message}) == (REGION, 0.0)


def test_the_window_goes_on_where_the_client_began_it(hello: Live) -> None:
    assert predicted(hello, "/completion", {"prompt": SWEEP + FILE[:40]}) == (FILE[40:], 0.0)
    hello.service.forget(("Hello",))
    assert predicted(hello, "/completion", {"prompt": SWEEP.removesuffix("\n")}) == ("\n" + FILE, 0.0)


def test_zeta_begins_with_the_block_at_the_cursor(hello: Live) -> None:
    text = "<[fim-suffix]>\n<[fim-prefix]><filename>a.py\n<|marker_1|>a\n<|marker_2|>b = <|user_cursor|>\n<|marker_3|>"
    found, _ = predicted(hello, "/completion", {"prompt": f"{text}\n<[fim-middle]>"})
    assert found == "<|marker_2|>b = \n<|marker_3|><|marker_1|>a\n"


@pytest.mark.parametrize("end", ["", "<|!@#IS_NEXT_EDIT!@#|>"])
def test_mercury_answers_with_the_marks(hello: Live, end: str) -> None:
    """Continue adds a mark that only Inception's own server takes off again."""
    code = "<|code_to_edit|>\nx = 1\n<|/code_to_edit|>"
    text = f"<|current_file|>\n{code}\n<|/current_file|>\n<|edit_diff_history|>\n<|/edit_diff_history|>\n"
    body = {"messages": [{"role": "user", "content": text + end}]}
    assert predicted(hello, "/v1/chat/completions", body) == (code, 0.0)


LOOKS_LIKE_ONE = {
    "no file to update": SWEEP.rpartition("<|file_sep|>")[0],
    "another file's update": SWEEP.replace("updated/shapes.py", "updated/solids.py"),
    "no original file": SWEEP.replace("original/", "older/"),
    "an unfinished mark": SWEEP.replace("<|file_sep|>current/", "<|file_sep current/"),
    "a mark after the answer": f"{SWEEP}x = 1\n<|file_sep|>other.py\n",
    "no end of the region": NEXT_EDITS["ZED_ZETA"].body["prompt"].replace("<|editable_region_end|>", ""),
    "no request to answer": NEXT_EDITS["ZED_ZETA"].body["prompt"].removesuffix("### Response:\n"),
    "no beginning of the region": NEXT_EDITS["ZED_ZETA_2"].body["prompt"].replace("CURRENT", "OURS"),
    "an unfinished number": NEXT_EDITS["ZED_ZETA_2_1"].body["prompt"].replace("marker_2|>", "marker_"),
    "one block mark": NEXT_EDITS["ZED_ZETA_2_1"].body["prompt"].replace("<|marker_2|>", ""),
    "code about it": 'MARK = "<|editable_region_start|>"\nEND = "<|editable_region_end|>"\n',
    "a gap": "<[fim-suffix]>\nprint(x)\n<[fim-prefix]>x = <[fim-middle]>",
}


@pytest.mark.parametrize("prompt", LOOKS_LIKE_ONE.values(), ids=LOOKS_LIKE_ONE)
def test_a_prompt_that_only_looks_like_one_is_an_ordinary_completion(hello: Live, prompt: str) -> None:
    usual = hello.service.engine.sampling().temperature
    assert usual > 0
    assert predicted(hello, "/v1/completions", {"prompt": prompt}) == ("", usual)


def test_a_prediction_of_the_client_takes_precedence(hello: Live) -> None:
    body = {"prompt": SWEEP, "prediction": {"type": "content", "content": "its own"}}
    assert predicted(hello, "/v1/completions", body)[0] == "its own"


def answer(live: Live, request: Recorded, **changes: Any) -> dict[str, Any]:
    found = live.post(request.path, request.body | changes)
    assert found.status_code == 200, found.text
    return dict(found.json())


@pytest.mark.parametrize("name", ["ZED_SWEEP", "ZED_ZETA", "ZED_ZETA_2_1"])
def test_the_answer_is_that_of_plain_decoding(demo: Live, name: str) -> None:
    texts = [
        answer(demo, NEXT_EDITS[name], rest_local={"policy": policy})["choices"][0]["text"]
        for policy in ("auto", "off")
    ]
    assert texts[0] == texts[1] != ""


def typed(letters: str) -> str:
    """Return the prompt after further keystrokes. Everything before the newest change of the file stays the same."""
    return SWEEP.replace("radius**\n", f"radius**{letters}\n")


def tokens_of(live: Live, prompt: str) -> list[int]:
    body = {"content": prompt, "parse_special": True, "add_special": True}
    return list(live.post("/tokenize", body).json()["tokens"])


def same_tokens(live: Live, one: str, other: str) -> int:
    """Count the tokens that two prompts begin with."""
    pairs = zip(tokens_of(live, one), tokens_of(live, other), strict=False)
    return next(number for number, (token, again) in enumerate(pairs) if token != again)


def test_the_prompt_is_read_from_the_change_on(demo: Live) -> None:
    request = NEXT_EDITS["ZED_SWEEP"]
    answer(demo, request, prompt=typed(""))
    for letters in ("2", "2 ", "2 #"):
        usage = answer(demo, request, prompt=typed(letters))["usage"]
        same = same_tokens(demo, typed(letters[:-1]), typed(letters))
        assert usage["prompt_tokens_details"]["cached_tokens"] >= same > 20


def is_writing(live: Live, n_prompt: int) -> bool:
    """Return True if a slot is writing the answer to a prompt of so many tokens."""
    return any(slot["is_processing"] and slot["n_past"] > n_prompt for slot in live.get("/slots").json())


def test_keystrokes_faster_than_the_model_free_their_slots(demo: Live) -> None:
    """Editors close the connection of a request that is out of date. What it has evaluated stays."""
    request = NEXT_EDITS["ZED_SWEEP"]
    slow = {"max_tokens": 1500, "stop": [], "ignore_eos": True, "rest_local": {"policy": "off"}}
    for letters in ("", "3", "3 "):
        connection = sent(demo, request.path, request.body | slow | {"prompt": typed(letters)})
        n_prompt = len(tokens_of(demo, typed(letters)))
        until(partial(is_writing, demo, n_prompt))
        connection.close()
        becomes_idle(demo)
    usage = answer(demo, request, prompt=typed("3 *"))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= same_tokens(demo, typed("3 "), typed("3 *"))
