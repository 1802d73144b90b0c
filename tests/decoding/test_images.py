"""Prompts with images next to everything else that an engine does."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.heads import forget_learned
from support.images import MARK, WIDTH, picture, projector_for, reference

from models import tiny_mmproj
from rest_local import Engine, OptionError, PromptTooLong, Sampling, Service
from rest_local.chat.images import part_of
from rest_local.decoding.opening import Projector
from rest_local.drafting.sources import Sources
from rest_local.errors import GenerationError, ProjectorInvalid
from rest_local.llama.context import ContextSettings
from rest_local.llama.placeholders import ids_of, spans

GREEDY = Sampling(temperature=0)
Prompt = tuple[list[int], tuple[Any, ...]]
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, list[Engine]]]:
    """Yield the engines that no test uses now, by their options."""
    idle: dict[str, list[Engine]] = {}
    yield idle
    for engine in itertools.chain.from_iterable(idle.values()):
        engine.close()


@pytest.fixture
def opened(engines: dict[str, list[Engine]], tiny_model, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens an engine without history. Only different tests share engines."""
    used: list[tuple[str, Engine]] = []

    def open_(arch: str = "llama", **options: Any) -> Engine:
        key = f"{arch} {options}"
        if idle := engines.get(key):
            engine = idle.pop()
            forget_learned(engine)
            if projector := engine.projector:
                projector.encoded = 0
                with projector._lock:
                    for cache in (projector._layouts, projector._decoded, projector._rows):
                        cache.clear()
        else:
            given = {"mmproj": projector_for(arch, tmp_path), "n_ctx": 512, "threads": 1, "slots": 1} | options
            engine = Engine.load(tiny_model(arch), **given)
        used.append((key, engine))
        return engine

    yield open_
    for key, engine in used:
        engines.setdefault(key, []).append(engine)


def prompt(engine: Engine, text: str, *seeds: int, size: tuple[int, int] = (40, 30)) -> Prompt:
    """Return `text` with an image for each `{}`."""
    marks = [f"<{number}>" for number in range(len(seeds))]
    return engine.image_prompt(text.format(*marks), dict(zip(marks, (picture(s, size) for s in seeds), strict=True)))


def answer(engine: Engine, given: Prompt, n: int = 20, **options: Any) -> list[int]:
    return engine.generate(given[0], images=given[1], max_tokens=n, sampling=GREEDY, **options).wait().tokens


def encoded(engine: Engine) -> int:
    assert engine.projector is not None
    return engine.projector.encoded


# The answer


def test_the_parts_in_which_an_image_is_evaluated_do_not_matter(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opened("qwen2vl", exact=True)
    given = prompt(whole, "abc {} def {} ", 1, 2, size=(96, 64))
    expected = answer(whole, given)
    parts = opened("qwen2vl", exact=True)
    monkeypatch.setattr(parts.decoder.context.scheduler.backend, "n_batch", 7)
    assert answer(parts, prompt(parts, "abc {} def {} ", 1, 2, size=(96, 64))) == expected


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "qwen2vl"])
def test_requests_in_the_same_passes_get_the_answers_that_they_get_alone(arch: str, opened: Open) -> None:
    engine = opened(arch, slots=4)
    texts = ["abc {} def", "no image here", "{} and {} x", "abc {} other"]
    given = [prompt(engine, text, *range(number, number + text.count("{}"))) for number, text in enumerate(texts)]
    alone = []
    for each in given:
        engine.decoder.forget()
        alone.append(answer(engine, each))
    engine.decoder.forget()
    requests = [engine.request(tokens, images=images, max_tokens=20, sampling=GREEDY) for tokens, images in given]
    together = {each.number: each.result.tokens for each in engine.batch(iter(requests))}
    assert [together[number] for number in range(4)] == alone


class Held:
    """Images that are encoded wait until `go_on` is set. `begun`: one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, encoded = threading.Event(), threading.Event(), Projector._encoded

        def encode(projector: Projector, chunk: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(60)
            return encoded(projector, chunk)

        monkeypatch.setattr(Projector, "_encoded", encode)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_others_go_on_while_an_image_is_encoded(opened: Open, held: Held) -> None:
    engine = opened(slots=2)
    tokens, images = prompt(engine, "what is {}? ", 1)
    with Service(engine) as service:
        seeing = service.submit(engine.request(tokens, images=images, max_tokens=5, sampling=GREEDY))
        other = service.submit(engine.request("abc abc", max_tokens=50, sampling=GREEDY, ignore_end=True))
        assert len(other.wait(60).tokens) == 50
        assert not seeing.done
        held.go_on.set()
        assert seeing.wait(60).tokens


def test_a_request_is_cancelled_while_its_image_is_encoded(opened: Open, held: Held) -> None:
    engine = opened()
    tokens, images = prompt(engine, "what is {}? ", 1)
    with Service(engine) as service:
        seeing = service.submit(engine.request(tokens, images=images, max_tokens=5))
        assert held.begun.wait(60)
        seeing.cancel()
        assert service.submit(engine.request("abc", max_tokens=3)).wait(60).tokens  # There is only one slot.
        assert seeing.done
        assert seeing.result.finish_reason == "cancelled"
        held.go_on.set()


def test_after_an_image_whose_request_is_cancelled_passes_teach_what_they_cost_again(opened: Open) -> None:
    engine = opened(slots=2)
    scheduler = engine.decoder.context.scheduler
    other = engine.decoder.prepare(engine.request("abc abc", max_tokens=50, sampling=GREEDY, ignore_end=True))
    tokens, images = prompt(engine, "what is {}? ", 1)
    seeing = engine.decoder.prepare(engine.request(tokens, images=images, max_tokens=5))
    engine.decoder.submit(seeing)
    while not scheduler.prefill.was_image:
        engine.decoder.step()
    engine.decoder.cancel(seeing)
    engine.decoder.submit(other)
    engine.decoder.step()
    assert not scheduler.prefill.was_image
    engine.decoder.cancel(other)


def test_an_image_that_cannot_be_encoded_ends_its_request_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(slots=2)
    given = prompt(engine, "what is {}? ", 1)

    def fail(self: Projector, chunk: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Projector, "_encoded", fail)
        failing = engine.request(given[0], images=given[1], max_tokens=5)
        other = engine.request("abc", max_tokens=5, sampling=GREEDY)
        done = {each.number: each for each in engine.batch(iter([failing, other]))}
    assert isinstance(done[0].error, GenerationError)
    assert "no memory" in str(done[0].error)
    assert done[1].error is None
    assert answer(engine, given)  # it is tried again


# What is kept


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2vl"])
def test_the_second_turn_evaluates_what_is_new(arch: str, opened: Open) -> None:
    engine = opened(arch)
    first = prompt(engine, "abc {} what? ", 1)
    tokens = [*first[0], *answer(engine, first, ignore_end=True), *engine.tokenize(" and this? ")]
    stream = engine.generate(tokens, images=first[1], max_tokens=5, sampling=GREEDY)
    timings = stream.wait().timings
    assert timings.cached_tokens >= len(first[0])
    assert timings.prompt_tokens + timings.cached_tokens == len(tokens)
    assert encoded(engine) == 1
    fresh = opened(arch)
    assert stream.result.tokens == answer(fresh, (tokens, first[1]), 5)


def test_texts_share_what_comes_before_the_first_image_that_differs(opened: Open) -> None:
    engine = opened()
    one, other = prompt(engine, "abc {} def {} x", 1, 2), prompt(engine, "abc {} def {} x", 1, 3)
    answer(engine, one)
    stream = engine.generate(other[0], images=other[1], max_tokens=1)
    places = list(spans(other[0]))
    assert stream.wait().timings.cached_tokens == places[1][0]
    assert encoded(engine) == 3


def test_an_image_is_shared_with_another_slot(opened: Open) -> None:
    engine = opened("qwen2vl", slots=2)
    given = prompt(engine, "abc abc abc abc abc {} what? ", 1)
    requests = [engine.request(given[0], images=given[1], max_tokens=9, sampling=GREEDY) for _ in range(2)]
    done = list(engine.batch(iter(requests)))
    assert done[0].result.tokens == done[1].result.tokens
    assert encoded(engine) == 1
    assert sum(each.result.timings.cached_tokens for each in done) >= len(given[0]) - 2


def test_the_history_gets_text_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, written = opened(), list[int]()
    monkeypatch.setattr(engine.decoder, "_history", SimpleNamespace(add=written.extend))
    monkeypatch.setattr(Sources, "use", lambda *_: None)
    result = answer(engine, prompt(engine, "abc {} what? ", 1), ignore_end=True)
    assert written == result
    assert min(written) >= 0


@pytest.mark.parametrize("policy", ["auto", "respec"])
def test_no_source_drafts_an_image(policy: str, opened: Open) -> None:
    """The text after the image repeats what stands before it: what follows there is the image."""
    engine = opened(policy=policy)
    given = prompt(engine, "abcd abcd {} abcd abcd", 1)
    result = engine.generate(given[0], images=given[1], max_tokens=60, sampling=GREEDY, ignore_end=True).wait()
    assert len(result.tokens) == 60
    assert min(result.tokens) >= 0


def test_a_prompt_that_is_too_long_is_refused(opened: Open) -> None:
    engine = opened(n_ctx=64)
    given = prompt(engine, "abc {} def {} ghi {} jkl {} x", 1, 2, 3, 4)
    with pytest.raises(PromptTooLong):
        answer(engine, given)
    with pytest.raises(PromptTooLong):
        engine.image_prompt("{}" * 9, {"{}": picture(1)}, most=64)


# With other settings


def test_a_draft_model_does_not_follow_a_text_with_images(opened: Open, tiny_model) -> None:
    engine = opened(draft_model=tiny_model("llama", n_layers=2), exact=True, policy="auto")
    given = prompt(engine, "abc {} what? ", 1)
    expected = answer(opened(exact=True, policy="off"), given, 40)
    assert answer(engine, given, 40) == expected
    plain = engine.generate("abc abc abc", max_tokens=30, sampling=GREEDY).wait()  # It gets the same slot.
    assert plain.tokens
    assert answer(engine, given, 40) == expected


def test_lost_cells_are_evaluated_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that fails in the middle of an answer: the image in the cells is evaluated once more."""
    engine = opened()
    given = prompt(engine, "abc {} what? ", 1)
    expected = answer(engine, given, policy="off")
    engine.decoder.forget()
    context = engine.decoder.context.backend
    decode, calls = context.decode, []

    def failing() -> int:
        calls.append(context.batch.n_tokens)
        return -3 if len(calls) == 6 else decode()

    monkeypatch.setattr(context, "decode", failing)
    assert answer(engine, given, policy="off") == expected
    assert len(calls) > 20


# Conversations


def test_a_conversation_with_images(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[a] "
    monkeypatch.setattr(engine.model, "chat_template", template)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "See"}, part_of(picture(1))]}]
    stream = engine.chat(messages, max_tokens=10, sampling=GREEDY)
    stream.wait()
    messages += [stream.message, {"role": "user", "content": [part_of(picture(2)), {"type": "text", "text": "Now?"}]}]
    result = engine.chat(messages, max_tokens=10, sampling=GREEDY).wait()
    assert result.timings.cached_tokens > 16
    assert encoded(engine) == 2


@pytest.mark.parametrize("options", [{"mmproj": None}, {"mmproj": "none"}, {"mmproj": "auto"}])
def test_without_a_projector_images_are_refused(
    options: dict[str, Any], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(**options)
    assert engine.projector is None
    assert not engine.warnings
    monkeypatch.setattr(engine.model, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(OptionError, match=r"messages\[0\].content\[0\]: the model has no projector"):
        engine.chat([{"role": "user", "content": [part_of(picture(1))]}])


@pytest.mark.parametrize("wrong", [[5, -7], [-1, 5], [5, *ids_of(b"x", 3), 5]])
def test_negative_ids_alone_are_refused(wrong: list[int], opened: Open) -> None:
    engine = opened()
    with pytest.raises(OptionError):
        engine.generate(wrong)
    images = prompt(engine, "abc {} x", 1)[1]
    with pytest.raises(OptionError):
        engine.generate(wrong, images=images)


# Opening


def test_the_projector_next_to_the_model_is_used(tiny_model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(tiny_model("llama").read_bytes())
    tiny_mmproj.write(folder / "mmproj-F16.gguf", WIDTH)
    with Engine.load(folder / "model.gguf", mmproj="auto", n_ctx=256) as engine:
        assert engine.projector is not None
    with Engine.load(folder / "model.gguf", n_ctx=256) as engine:
        assert engine.projector is None


def test_one_that_does_not_fit_is_refused_where_it_was_named_and_a_warning_where_it_was_found(
    tiny_model, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(tiny_model("llama").read_bytes())
    wrong = tiny_mmproj.write(folder / "mmproj-F16.gguf", 2 * WIDTH)
    with pytest.raises(ProjectorInvalid):
        Engine.load(folder / "model.gguf", mmproj=wrong, n_ctx=256)
    with Engine.load(folder / "model.gguf", mmproj="auto", n_ctx=256) as engine:
        assert engine.projector is None
        (warning,) = [each for each in engine.warnings if "images are refused" in each]
        assert "mismatch" in warning


# ---- Exactness -----------------------------------------------------------------------------------------------------


TEXT = f"abc abc abc {MARK} and abc abc, then {MARK}{MARK}. abc abc: "
N = 24


@pytest.mark.parametrize(
    ("arch", "policy"),
    [("llama", "off"), ("llama", "rest"), ("gemma3", "off"), ("gemma3", "rest"),
     ("lfm2", "off"), ("lfm2", "auto"), ("qwen2vl", "off"), ("qwen2vl", "auto")],
)  # fmt: skip
def test_the_answer_is_that_of_libmtmd(arch: str, policy: str, tiny_model, tmp_path: Path) -> None:
    model, projector = tiny_model(arch), projector_for(arch, tmp_path)
    images = [picture(1), picture(2, (33, 64)), picture(3)]
    with Engine.load(model, mmproj=projector, n_ctx=512, exact=True, policy=policy, threads=1) as engine:
        settings = ContextSettings.from_dict(engine.decoder.context.backend.settings.to_dict())
        expected, told = reference(engine.model, projector, settings, TEXT, images, N)
        marks = {f"<image {i}>": data for i, data in enumerate(images)}
        text = TEXT
        for mark in marks:
            text = text.replace(MARK, mark, 1)
        prompt, chunks = engine.image_prompt(text, marks)
        for _ in range(2):  # again with everything in the cells
            stream = engine.generate(prompt, images=chunks, max_tokens=N, sampling=GREEDY, logprobs=3)
            found = [each for piece in stream for each in piece.logprobs]
            result = stream.result
            assert result.tokens == expected
            assert found == told[: len(found)]  # every bit
        assert engine.projector is not None
        assert engine.projector.encoded == 3
        if policy == "rest" and engine.decoder.context.capability.kind != "none":
            assert result.draft.drafted
