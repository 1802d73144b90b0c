"""Long and hostile texts give the tokens of llama.cpp's own call, without a crash and at linear cost."""

import base64
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as bindings
from support.toy import demo_model

from rest_local.errors import ModelError, ServiceClosed
from rest_local.llama import model as model_module
from rest_local.llama import tokenizer
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override
from rest_local.llama.tokenizer import PART_CHARACTERS, SHORT_PART_CHARACTERS, SafeCuts, Tokenizer, fits
from rest_local.llama.vocabulary import Vocabulary
from rest_local.stop import Stop

CODE = "".join(path.read_text() for path in sorted(Path(tokenizer.__file__).parent.glob("*.py")))[:2_500]
RANDOM = random.Random(7)
PARTS = ("foo", "Bar", " ", "  ", "\n", "\n\n", "'s", "'", "9", "123", "(", ")", "/", "//", "é", "e\u0301", "中", "。")
MORE = ("\t", "日本", "don't", "WE'LL", "-", "_", "=", "\r\n", "<|im_end|>", "Ünï", ",", "½", "\u2028", "a\n/", "🎉")
TEXTS = {
    "code": CODE,
    "crlf": CODE.replace("\n", "\r\n"),
    "minified": CODE.replace("\n", "").replace("    ", ""),
    "chinese": "模型检查许多标记\uff0c一切都取决于是否值得。那么\uff0c为什么不呢\uff1f这是一个很长的句子\uff01" * 15,
    "base64": base64.b64encode(RANDOM.randbytes(800)).decode(),
    "hex": RANDOM.randbytes(600).hex(),
    "json": json.dumps([{"id": i, "x": RANDOM.random(), "name": "a b"} for i in range(40)], separators=(",", ":")),
    "mixed": "".join(RANDOM.choice(PARTS + MORE) for _ in range(600)),
}
# Each has its own patterns; the others in llama.cpp's list share them.
KINDS = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3")
KINDS += ("falcon", "starcoder", "bloom", "viking", "seed-coder", "exaone-moe", "youtu", "tiny_aya", "kimi-k2")
KINDS += ("superbpe", "default", "chameleon", "bailingmoe", "minicpm5", "jais-2", "afmoe", "laguna", "ufakzeka")
KINDS += ("spark2_5", "gemma4")


def opened(path: Path, kind: str = "") -> Model:
    """Open a tokenizer, with the pre-tokenizer `kind` in place of the model's own."""
    override = (Override.parse(f"tokenizer.ggml.pre=str:{kind}"),) if kind else ()
    return Model.open(path, vocab_only=True, options=ModelOptions(override_kv=override))


def whole(vocabulary: Vocabulary, text: str, *, special: bool = False, add_special: bool = False) -> list[int]:
    """Return the tokens of llama.cpp's own call."""
    data = text.encode()
    tokens = np.empty(len(data) + 64, np.int32)
    address = tokens.ctypes.data_as(bindings.llama_token_p)
    count = llama_cpp.llama_tokenize(vocabulary.pointer, data, len(data), address, len(tokens), add_special, special)
    return tokens[:count].tolist()


Real = Callable[[str], Vocabulary]


@pytest.fixture(scope="module")
def demo(vocabulary_of: Real) -> Vocabulary:
    return vocabulary_of("demo")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts so small that every text has dozens of cuts."""
    monkeypatch.setattr(tokenizer, "PART_CHARACTERS", 300)
    monkeypatch.setattr(tokenizer, "SHORT_PART_CHARACTERS", 100)


def check_equal(vocabulary: Vocabulary) -> None:
    for name, text in TEXTS.items():
        assert vocabulary.tokenize(text).tolist() == whole(vocabulary, text), name


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["llama-spm", "qwen2", "llama-bpe"])
def test_the_parts_of_a_text_give_the_tokens_of_the_whole(vocabulary_of: Real, name: str) -> None:
    check_equal(vocabulary_of(name))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_holds_for_every_pre_tokenizer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "ensure_loadable", lambda *_: None)  # no child tries the same file 29 times
    with opened(demo_model(), kind) as model:
        check_equal(model.vocabulary)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the texts that llama.cpp gets."""
    read: list[int] = []
    call = Tokenizer._call

    def watched(self: Tokenizer, text: str) -> Any:
        read.append(len(text))
        return call(self, text)

    monkeypatch.setattr(Tokenizer, "_call", watched)
    return read


def test_special_tokens_and_added_tokens_are_those_of_the_whole(vocabulary_of: Real) -> None:
    text = "<|im_start|>user\nHi <s>there</s><|im_end|>\n<|begin_of_text|><|eot_id|>  x <|im_start|>"
    for vocabulary in map(vocabulary_of, ("demo", "llama-spm", "qwen2", "llama-bpe")):
        for options in ({}, {"special": True}, {"add_special": True}, {"special": True, "add_special": True}):
            for each in (text, "", "<|im_end|>", "\n", CODE[:1000] + text):
                found = vocabulary.tokenize(each, **options).tolist()
                assert found == whole(vocabulary, each, **options), (vocabulary.size, each[:20], options)


def test_a_text_without_a_safe_cut_is_cut_anyway() -> None:
    for run in ("a", " ", "\n", "中", "."):
        parts = list(SafeCuts(["a", "b"]).parts(run * 10_000))
        assert "".join(parts) == run * 10_000
        assert max(map(len, parts)) == SHORT_PART_CHARACTERS


def test_ordinary_text_is_cut_into_large_parts() -> None:
    text = CODE * 3
    parts = list(SafeCuts(["a"]).parts(text))
    assert "".join(parts) == text
    assert len(parts) <= 2 * len(text) // PART_CHARACTERS + 1
    assert fits(CODE[:PART_CHARACTERS])


CRASH = """
import sys, threading
from rest_local.llama import model
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Override
model.ensure_loadable = lambda *_: None  # no child of this one
threading.stack_size(512 * 1024)
def work(path, kind):
    override = Override.parse("tokenizer.ggml.pre=str:" + kind)
    with Model.open(path, vocab_only=True, options=ModelOptions(override_kv=(override,))) as model:
        for run in ("a", "A", "1", ".", " ", "\\n", "\\n ", "aA", "='", "a ", "\\u4e2d", "e\\u0301", "\\t.", "..\\n"):
            size = 100_000 if run == "a" and kind == sys.argv[2] else 2_500  # 1 700 end a process, without parts
            n = len(model.vocabulary.tokenize((run * size)[:size]))
            assert n > 0, run
        print(kind, flush=True)
for kind in sys.argv[2:]:
    thread = threading.Thread(target=work, args=(sys.argv[1], kind))
    thread.start()
    thread.join()
"""


def test_a_hundred_thousand_equal_characters_end_no_process() -> None:
    """A child process tokenizes them on threads with the stack size of macOS."""
    kinds = ["tekken", "deepseek-v3", "deepseek-llm", "bloom"]
    command = [sys.executable, "-c", CRASH, str(demo_model()), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.split()) == (0, kinds), done.stderr[-2000:]


def test_the_cost_is_linear_in_special_tokens(demo: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp never gets several markers at once, because it scans a list of all of them for each."""
    calls: list[int] = []
    call = Tokenizer._whole

    def watched(self: Tokenizer, pointer: int, data: bytes, **options: Any) -> Any:
        calls.append(len(data))
        return call(self, pointer, data, **options)

    monkeypatch.setattr(Tokenizer, "_whole", watched)
    text = "<|im_start|>user\nhello<|im_end|>\n" * 20_000
    tokens = demo.tokenize(text, special=True)
    (start,) = demo.tokenize("<|im_start|>", special=True).tolist()
    assert tokens.tolist().count(start) == 20_000
    assert sum(calls) < 1000, "equal stretches were tokenized again"


def test_no_more_text_is_read_than_needed(demo: Vocabulary, read: list[int]) -> None:
    text = CODE * 100
    tokens = demo.tokenize(text, most=500)
    assert len(tokens) > 500
    assert tokens.tolist() == demo.tokenize(text).tolist()[: len(tokens)]
    read.clear()
    demo.tokenize(text, most=500)
    assert sum(read) <= PART_CHARACTERS


def test_a_stop_takes_effect_at_the_next_part(demo: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, calls = Stop(), 0
    call = Tokenizer._call

    def watched(self: Tokenizer, text: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            stop.set()
        return call(self, text)

    monkeypatch.setattr(Tokenizer, "_call", watched)
    with stop.here(), pytest.raises(ServiceClosed):
        demo.tokenize(CODE * 100)
    assert calls == 3
    assert len(demo.tokenize("next"))


def test_a_model_is_not_freed_while_a_thread_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits for the running call. The thread's next call raises an error and does not read freed memory."""
    model = opened(demo_model())
    inside, go, freed = threading.Event(), threading.Event(), threading.Event()
    call = Tokenizer._whole

    def held(self: Tokenizer, pointer: int, data: bytes, **options: Any) -> Any:
        inside.set()
        assert go.wait(60)
        assert not freed.is_set(), "the model was freed during a call"
        return call(self, pointer, data, **options)

    monkeypatch.setattr(Tokenizer, "_whole", held)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            model.vocabulary.tokenize(CODE * 10)
        except ModelError as error:
            errors.append(error)

    def close() -> None:
        model.close()
        freed.set()

    worker, closer = threading.Thread(target=work), threading.Thread(target=close)
    worker.start()
    assert inside.wait(60)
    closer.start()
    while not model.closed:
        pass
    assert not freed.wait(0.1)
    go.set()
    worker.join(60)
    closer.join(60)
    assert freed.is_set()
    assert len(errors) == 1
