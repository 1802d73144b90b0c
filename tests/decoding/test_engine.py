"""The engine over real llama.cpp contexts of tiny random models, one of each kind of memory."""

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_sources import always_draft
from support.toy import demo_model

from rest_local import Engine, Sampling
from rest_local.catalog.describe import header_of
from rest_local.decoding import opening
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.forward import ABORTED
from rest_local.decoding.stream import Result
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.sources import Sources
from rest_local.errors import OptionError, PromptTooLong
from rest_local.grammar import gbnf
from rest_local.llama.context import Context
from rest_local.llama.gguf import read_gguf
from rest_local.llama.model import Model
from rest_local.llama.options import LEAST_DEFAULT, ModelOptions, Override
from rest_local.planning.auto import Auto
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.router.memory import PROCESS_BYTES, need_of

TinyModel = Callable[..., Path]
PROMPT = "for number in range(10): print(number)\n" * 3
ARCHITECTURES = ("llama", "qwen2", "gemma3", "mamba", "lfm2")


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft at every step and as much as there is: most accepted and most rejected tokens."""
    always_draft(monkeypatch)
    monkeypatch.setattr(Auto, "learn", lambda self, drafted, tokens, done: None)


def finish(engine: Engine, prompt: str | list[int], n: int = 90, **options: object) -> Result:
    stream = engine.generate(prompt, max_tokens=n, **options)  # type: ignore[arg-type]
    text = "".join(piece.text for piece in stream)
    assert text == stream.result.text
    return stream.result


@pytest.fixture
def parrot(tmp_path: Path, tiny_model: TinyModel) -> Callable[[Engine, str], Path]:
    """Return a function that builds a datastore of what the model itself says, so that drafts are accepted."""

    def make(engine: Engine, prompt: str) -> Path:
        said = finish(engine, prompt, 90, policy="off").tokens
        identity = engine.model.vocabulary.identity
        tokens = np.array([*engine.tokenize(prompt), *said], np.int32)
        build(tmp_path / "parrot", [("said", tokens)], vocabulary=identity, recipe={})
        return tmp_path / "parrot"

    return make


@pytest.mark.usefixtures("keen")
def test_a_prediction_drafts_and_changes_nothing(tiny_model: TinyModel) -> None:
    """Right, wrong, with ids the model does not have, of one token: the answer stays, the right one is fast."""
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=True) as engine:
        plain = finish(engine, PROMPT, policy="off")
        right = finish(engine, PROMPT, prediction=plain.tokens)
        assert right.tokens == plain.tokens
        assert right.draft.by_source["prediction"].accepted > 40
        for wrong in (
            plain.tokens[::-1],
            plain.tokens[:1],
            [*plain.tokens[:5], engine.model.n_vocab],
            "x = 1\n" * 5000,
        ):
            assert finish(engine, PROMPT, prediction=wrong).tokens == plain.tokens
        assert "prediction" not in finish(engine, PROMPT).draft.by_source


@pytest.mark.usefixtures("keen")
def test_exact_output_is_plain_output_under_every_sampler(
    tiny_model: TinyModel, parrot: Callable[[Engine, str], Path]
) -> None:
    """Samplers with a state or a random generator of their own advance once for each token, drafted or not."""
    model = tiny_model("llama", quant="Q8_0")
    with Engine.load(model, n_ctx=512, exact=True) as engine:
        store = parrot(engine, PROMPT)
    with Engine.load(model, n_ctx=512, exact=True, datastores=[store]) as engine:
        accepted = 0
        for options in (
            {"dry_multiplier": 0.8},
            {"temperature": 0.5, "dry_multiplier": 0.8, "dry_penalty_last_n": -1},
            {"temperature": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.05},
            {"xtc_probability": 0.5, "xtc_threshold": 0.01},
            {"temperature": 0.5, "typical_p": 0.9},
            {"temperature": 0.7, "top_n_sigma": 1.0},
            {"temperature": 0.5, "dynatemp_range": 0.3},
            {"temperature": 0.7, "mirostat": 1, "mirostat_tau": 2.0},
            {"temperature": 0.7, "mirostat": 2, "mirostat_tau": 2.0},
            {"temperature": 0.5, "adaptive_target": 0.5},
            {"temperature": 0.5, "samplers": ("temperature", "min_p", "penalties"), "repeat_penalty": 1.1},
        ):
            sampling = Sampling(seed=5, **options)  # type: ignore[arg-type]
            plain = finish(engine, PROMPT, policy="off", sampling=sampling)
            drafted = finish(engine, PROMPT, sampling=sampling)
            assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
            accepted += drafted.draft.accepted
        assert accepted > 100


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_a_pass_that_is_broken_off_is_done_again_and_changes_no_answer(
    arch: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has begun, and half way; at every third decode, of parts of prompts and of steps."""
    with Engine.load(tiny_model(arch, quant="Q8_0"), n_ctx=512, exact=True) as engine:
        wanted = finish(engine, PROMPT, 30).tokens
        engine.decoder.forget()
        context, calls = engine.decoder.context.backend, itertools.count()
        decode = context.decode

        def broken_off() -> int:
            call = next(calls)
            if call % 3:
                return decode()
            if call % 2:
                decode()  # all of it is in the cells, and yet the code says that it was broken off
                return ABORTED
            context.breaker.number = 1
            context.breaker.abort(1)
            code = decode()
            context.breaker.number = 0
            return code

        monkeypatch.setattr(context, "decode", broken_off)
        assert finish(engine, PROMPT, 30).tokens == wanted
        assert next(calls) > 15


@pytest.mark.parametrize(("exact", "passes"), [(None, 1), (False, 1), (True, 2)])
def test_the_first_token_comes_with_the_prompt(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, exact: bool | None, passes: int
) -> None:
    """Exact answers take a pass more, so that they do not depend on how much of the prompt was in the cells."""
    calls: list[int] = []
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=exact, threads=1) as engine:
        decode = Context.decode
        monkeypatch.setattr(Context, "decode", lambda self: calls.append(1) or decode(self))
        engine.generate("def area(", max_tokens=1).wait()
    assert len(calls) == passes


def test_limits_are_refused_with_their_numbers(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", quant="Q8_0")
    with Engine.load(model, n_ctx=64) as engine:
        n_ctx = engine.settings["n_ctx"]
        with pytest.raises(PromptTooLong, match=str(n_ctx)):
            engine.generate("word " * 4 * n_ctx)
        result = finish(engine, "a", 10_000)
        assert result.finish_reason == "length"
        assert len(result.tokens) == n_ctx
        with pytest.raises(OptionError, match="max_tokens is -1"):
            engine.generate("a", max_tokens=-1)
        with pytest.raises(OptionError, match="policy"):
            engine.generate("a", policy="fastest")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="token ids"):
            engine.generate([10**6])
        with pytest.raises(OptionError, match="logprobs"):
            engine.generate("a", logprobs=1000)
        assert finish(engine, "a", 0).tokens == []
    with pytest.raises(OptionError, match="context"):
        Engine.load(model, n_ctx=2)


@pytest.mark.usefixtures("keen")
def test_a_datastore_that_breaks_costs_speed_only(
    tiny_model: TinyModel,
    parrot: Callable[[Engine, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama", quant="Q8_0")
    with Engine.load(model, n_ctx=512, exact=True) as engine:
        plain = finish(engine, PROMPT, policy="off")
        store = parrot(engine, PROMPT)

    def broken(self: Datastore, *args: object) -> None:
        raise OSError(5, "Input/output error")

    with Engine.load(model, n_ctx=512, exact=True, datastores=[store]) as engine:
        monkeypatch.setattr(Datastore, "rows", broken)
        with caplog.at_level(logging.WARNING, "rest_local.drafting"):
            assert finish(engine, PROMPT).tokens == plain.tokens
            assert finish(engine, PROMPT).tokens == plain.tokens
    (record,) = caplog.records
    assert str(store) in record.message
    assert "Input/output error" in record.message


def test_foreign_token_ids_never_reach_the_model(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store whose vocabulary hash was forged: its ids are checked against the model's."""
    model = tiny_model("llama", quant="Q8_0")
    with Model.open(model, vocab_only=True) as opened:
        size = opened.vocabulary.size
        prompt = opened.vocabulary.tokenize("hello hello").tolist()
    from rest_local.retrieval.format import VocabularyId

    wide = VocabularyId(hash="0" * 64, size=50_000, name="wide")
    build(tmp_path / "wide", [("a", np.array([*prompt, 40_000], np.int32))], vocabulary=wide, recipe={})
    with Datastore.open(tmp_path / "wide") as store:
        sources = Sources([store], size)
        sources.restart(prompt)
        assert [rows.source for rows in sources.rows()] in ([], [1])
    assert "token ids the model does not have" in caplog.text


@pytest.mark.parametrize("mmap", [True, False])
def test_no_mmap_reaches_datastores_and_history(
    mmap: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read into memory, files may be cut under the engine (a network drive): it drafts on from what it has read."""
    monkeypatch.setattr("rest_local.retrieval.datastore.SMALL", 0)
    model, path = tiny_model("llama", quant="Q8_0"), tmp_path / "store"
    with Model.open(model, vocab_only=True) as opened:
        tokens = opened.vocabulary.tokenize(PROMPT)
        build(path, [("a", tokens)], vocabulary=opened.vocabulary.identity, recipe={})
    with Engine.load(model, n_ctx=256, datastores=[path], history=True, options=ModelOptions(mmap=mmap)) as engine:
        for store in engine.datastores.in_use:
            assert bool(store._maps) == mmap
        finish(engine, PROMPT, 5)
        earlier = engine.decoder._history
        assert earlier is not None
        earlier.commit()
        assert earlier._store is not None
        assert bool(earlier._store._maps) == mmap
        for file in path.glob("*.bin"):
            os.truncate(file, 0)
        assert finish(engine, PROMPT, 5, policy="rest").tokens
        assert len(engine.decoder.context.sources.failed) == int(mmap)


def test_overridden_keys_leave_no_hash_for_the_file(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))
    options = ModelOptions(override_kv=(Override("tokenizer.ggml.eos_token_id", "int", 0),))
    found = []
    for chosen in (options, ModelOptions()):
        with Engine.load(tiny_model("llama"), n_ctx=256, options=chosen) as engine:
            found.append(engine.model.vocabulary.hash)
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        assert found[1] == model.vocabulary.hash != found[0]


# ---- Chats ---------------------------------------------------------------------------------------------------------


QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
SYSTEM = {"role": "system", "content": "You are brief. " * 5}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"enum": [2]}}, "required": ["a"]},
    },
}
NUMBER = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(demo_model(), n_ctx=512, threads=1, policy="off") as engine:
        yield engine


def test_a_request_is_made_of_text_or_tokens(engine: Engine) -> None:
    made = engine.request("def", max_tokens=3, stop=["a", "b"], prediction="x = 1", min_tokens=2)
    assert list(made.prompt) == engine.tokenize("def")
    assert (made.max_tokens, made.stop, made.min_tokens) == (3, ("a", "b"), 2)
    assert list(made.prediction) == engine.model.vocabulary.tokenize("x = 1").tolist()
    assert engine.request([1, 2], prediction=[3]).prediction == [3]


def test_a_chat_is_the_continuation_of_its_prompt(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=8)
    text = "".join(piece.text for piece in stream)
    assert stream.message == {"role": "assistant", "content": text}
    plain = engine.generate(engine.chat_prompt(QUESTION), max_tokens=8)
    assert "".join(piece.text for piece in plain) == text


def test_a_chat_goes_on_after_a_last_message_of_the_assistant(engine: Engine) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "The sum"}]}
    prompt = engine.chat_prompt([*QUESTION, begun])
    assert prompt == engine.chat_prompt(QUESTION) + "The sum"
    stream = engine.chat([*QUESTION, begun], max_tokens=4)
    assert list(stream.state.request.prompt) == engine.tokenize(prompt)
    said = stream.wait().text
    assert stream.message == {"role": "assistant", "content": said}


def test_a_message_that_has_ended_or_whose_answer_is_forced_is_not_gone_on_with(engine: Engine) -> None:
    said = {"role": "assistant", "content": "The sum"}
    for messages, options in (
        ([*QUESTION, said | {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}], {}),
        ([*QUESTION, said | {"reasoning_content": "I add."}], {}),
        ([said], {}),
        ([*QUESTION, said], {"json_schema": NUMBER}),
        ([*QUESTION, said], {"tools": [ADD], "tool_choice": "required"}),
    ):
        _, chat = engine.chat_request(messages, **options)  # type: ignore[arg-type]
        assert not chat.prompt.endswith("The sum")


def test_a_forced_call_that_is_cut_before_its_arguments_is_no_text(engine: Engine) -> None:
    _, chat = engine.chat_request(QUESTION, tools=[ADD], tool_choice="required")
    assert chat.message(Result(text='<tool_call>\n{"name": ', finish_reason="length"))["content"] in (None, "")


def test_a_forced_call_is_in_the_message(engine: Engine) -> None:
    stream = engine.chat(QUESTION, max_tokens=80, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    list(stream)
    (call,) = stream.message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2}
    assert engine.chat([*QUESTION, stream.message, {"role": "tool", "content": "4"}], max_tokens=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [ADD], "tool_choice": "required", "json_schema": NUMBER},
        {"json_schema": NUMBER, "sampling": Sampling(grammar=gbnf('root ::= "a"'))},
        {"tools": [{}]},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_go_together_is_refused(engine: Engine, wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        engine.chat(QUESTION, **wrong)  # type: ignore[arg-type]


# ---- Configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"}, {"n_ctx": 0}, {"n_ctx": 7}, {"n_ctx": "all"}, {"threads": 0}, {"n_gpu_layers": -2},
        {"draft_gpu_layers": -2}, {"slots": 0}, {"slots": 1.5}, {"cells": 0}, {"datastores": "code"},
        {"datastores": Path("code")}, {"verify": "relaxed:3,0.3"}, {"verify": Relaxed(), "exact": True},
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EngineConfig(**wrong)
    with pytest.raises(OptionError):
        Engine.load("/nowhere/model.gguf", **wrong)


@pytest.mark.parametrize(
    ("n_ctx", "trained", "expected"),
    [
        ("trained", 1 << 17, 1 << 17),
        ("trained", 0, LEAST_DEFAULT),
        (512, 2048, 512),
        (3000, 2048, 3000),
    ],
)
def test_a_context_that_the_user_names_is_taken(n_ctx: Any, trained: int, expected: int) -> None:
    config = EngineConfig(n_ctx=n_ctx, slots=4)
    assert config.sized(trained, 1, room=0) == config
    assert config.context_length(trained) == expected


@pytest.mark.parametrize(
    ("slots", "trained", "room", "n_ctx", "cells"),
    [
        (4, 2048, 1 << 30, 2048, 8192),
        (4, 8192, 1 << 30, 8192, 16_384),
        (4, 1 << 17, 1 << 30, 1 << 17, 1 << 17),
        (1, 1 << 17, 90_000, 1 << 15, 1 << 15),
        (4, 40_960, 50_000, 20_480, 20_480),
        (4, 1 << 17, -1, 16_384, 16_384),
        (1, 1 << 17, -1, LEAST_DEFAULT, LEAST_DEFAULT),
        (1, 0, 1 << 30, LEAST_DEFAULT, LEAST_DEFAULT),
    ],
)
def test_the_default_context_is_the_trained_one_as_far_as_half_of_the_memory_goes(
    slots: int, trained: int, room: int, n_ctx: int, cells: int
) -> None:
    sized = EngineConfig(slots=slots).sized(trained, 1, room)
    assert (sized.n_ctx, sized.cells) == (n_ctx, cells)


def test_the_memory_for_the_default_context_is_what_the_weights_leave(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama", n_ctx=100_000)
    taken = path.stat().st_size + opening.BUFFERS
    cell = header_of(read_gguf(path), path).kv_bytes
    monkeypatch.setattr(opening, "free_memory", lambda config: taken + 2 * 60_000 * cell)
    config = EngineConfig(model=path, n_gpu_layers=0)
    assert opening.with_context(config).n_ctx == 50_000
    assert opening.with_context(config, taken + 2 * 30_000 * cell).n_ctx == 25_000
    assert need_of(config, path.stat().st_size + PROCESS_BYTES + 2 * 30_000 * cell).cache == 25_000 * cell
    assert opening.with_context(config, 1 << 60).n_ctx == 50_000
    with Engine.load(path, n_gpu_layers=0, slots=2) as engine:
        assert engine.n_ctx == 50_000


@pytest.mark.parametrize(
    ("free", "asked", "kept"), [(1 << 40, None, 16), (1 << 40, 3, 3), (0, 3, 3), (0, 0, 0), (0, None, 0), (9, None, 8)]
)
def test_snapshots_of_a_recurrent_state_are_those_that_fit(
    free: int, asked: int | None, kept: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free`: bytes, or so many states where few fit next to the model."""
    config = EngineConfig(model=tiny_model("lfm2"), slots=2, n_ctx=64, options=ModelOptions(rollback=asked))
    monkeypatch.setattr(opening, "free_memory", lambda config: 1 << 40)
    state = 2 * opening.snapshots_for(config, tiny_model("lfm2")).size
    header = header_of(read_gguf(tiny_model("lfm2")), tiny_model("lfm2"))
    rest = tiny_model("lfm2").stat().st_size + 2 * 64 * header.kv_bytes + opening.BUFFERS
    monkeypatch.setattr(opening, "free_memory", lambda config: free * state + rest if free == 9 else free)
    with Engine(config) as engine:
        assert engine.settings["n_rs_seq"] == kept
        assert engine.decoder.context.backend.rollback == kept
        told = [warning for warning in engine.warnings if "snapshots" in warning]
    assert len(told) == (asked is None and kept < 16)
