"""Texts on disk: a later engine, or the same one after an eviction, evaluates only what is new, and says the same."""

import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files import write_with
from support.heads import COVERING, draft_whatever_it_costs, model_and_drafter

from rest_local import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.kv_cache import cell_files, sessions
from rest_local.kv_cache.cell_format import PART, Head
from rest_local.llama import library
from rest_local.llama.options import ModelOptions
from rest_local.paths import cache_dir

TinyModel = Callable[..., Path]
LIMIT = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REST_LOCAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _sessions_of_the_test_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep sessions of short texts too, and whole ones, however slow the machine is.

    Otherwise a request waits at most a second for a text that gives way, and loses the rest.
    """
    monkeypatch.setattr(sessions, "LEAST_TOKENS", PART)
    monkeypatch.setattr(sessions, "LOSS_S", 600.0)
    yield
    home = cache_dir() / "sessions"
    if home.is_dir():
        shutil.rmtree(home)
    else:
        home.unlink(missing_ok=True)


def text(n: int, seed: int = 0) -> list[int]:
    """Return ids that every tiny vocabulary has."""
    rng = random.Random(seed)
    return [rng.randrange(40, 120) for _ in range(n)]


def opened(model: Path | None, **options: Any) -> Engine:
    return Engine.load(model, **{"n_ctx": 1024, "threads": 1, "policy": "off", "sessions": LIMIT, **options})


def answer(engine: Engine, prompt: list[int], n: int = 12, **options: Any) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were not evaluated."""
    result = engine.generate(prompt, max_tokens=n, ignore_end=True, **options).wait()
    assert result.timings.cached_tokens + result.timings.prompt_tokens == len(prompt)
    return list(result.tokens), result.timings.cached_tokens


def files() -> list[Path]:
    return sorted((cache_dir() / "sessions").rglob("*.cells"))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt-oss", "mamba", "lfm2"])
def test_a_later_engine_evaluates_only_what_is_new(tiny_model: TinyModel, arch: str) -> None:
    """The next turn; a text with another end, as when a template leaves out what was thought, for which recurrent
    memory goes back to a checkpoint; and, without such memory, one that has only the beginning.
    """
    model, first, more = tiny_model(arch), text(700), text(40, seed=1)
    with opened(model) as engine:
        said, cached = answer(engine, first)
        assert cached == 0
    texts = [([*first, *said, *more], 700), ([*first[:-5], *more], 512)]
    if arch not in ("mamba", "lfm2"):
        texts.append(([*first[:400], *more], 400 // PART * PART))
    for second, least in texts:
        with opened(model) as engine:
            found, cached = answer(engine, second)
            assert found == answer(engine, second, keep_prefix=False)[0]
        assert least <= cached < len(second)


def test_exact_answers_are_the_same_bits(tiny_model: TinyModel) -> None:
    """Log-probabilities as well, after cells of memory and of the disk."""

    def told(engine: Engine, prompt: list[int]) -> tuple[list[Any], int]:
        stream = engine.generate(prompt, max_tokens=24, ignore_end=True, logprobs=3)
        pieces = list(stream)
        return [each for piece in pieces for each in piece.logprobs], stream.result.timings.cached_tokens

    model = tiny_model("llama")
    first = text(5 * PART)
    with opened(model, exact=True, sessions=0, policy="auto") as engine:
        engine.decoder.context.compare()
        said, _ = answer(engine, first)
        second = [*first, *said, *text(40, seed=1)]
        expected, cached = told(engine, second)
        assert cached == len(first) + len(said) - 1
    with opened(model, exact=True, policy="auto") as engine:
        assert answer(engine, first)[0] == said
    with opened(model, exact=True, policy="auto") as engine:
        assert told(engine, second) == (expected, cached)


@pytest.mark.parametrize("drafter", COVERING)
def test_what_drafts_goes_on_after_a_restore(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)
    model, draft_model = model_and_drafter(drafter, tmp_path, "Q8_0")
    options: dict[str, Any] = {"policy": "auto", "n_ctx": 512}
    if draft_model is not None:
        options["draft_model"] = draft_model
    first, more = text(300), text(20, seed=1)
    with opened(model, **options | {"sessions": 0, "policy": "off"}) as engine:
        answer(engine, first)  # so that the same parts of the prompt are computed in tiles
        expected, _ = answer(engine, [*first, *more], 40)
    with opened(model, **options) as engine:
        answer(engine, first)
    with opened(model, **options) as engine:
        result = engine.generate([*first, *more], max_tokens=40, ignore_end=True).wait()
        assert result.timings.cached_tokens in (299, 300), "all but the end token that was left out"
        assert result.draft.of_source("model").drafted
    assert list(result.tokens) == expected


@pytest.mark.parametrize(("arch", "slots", "most"), [("llama", 2, 1), ("llama", 6, 1), ("gemma3", 6, 5)])
def test_an_idle_text_goes_for_a_long_prompt_and_comes_back(
    tiny_model: TinyModel, arch: str, slots: int, most: int
) -> None:
    """Five conversations in turn: each turn evaluates what is new, and says what it says if all stay in their slots.

    A copy of a sliding window lacks its beginning, so the text that it was copied from may stay, and cells are not in
    order, which changes bits.
    """
    model = tiny_model(arch, quant="Q8_0")
    options = ModelOptions(cache_type_k="bf16")  # Without tiles, whose bits depend on the place of a text.

    def turns(engine: Engine, most: int) -> Iterator[list[int]]:
        texts = [[*text(200, 99), *text(600, seed)] for seed in range(5)]
        for turn, (number, each) in itertools.product(range(3), enumerate(texts)):
            each += text(30, 10 * turn + number)
            said, cached = answer(engine, each)
            assert cached >= (len(each) - 31 if turn else 200 if number else 0)
            assert sum(slot.n_past > 0 for slot in engine.decoder.slots) <= most
            each += said
            yield said

    with opened(model, slots=6, n_ctx=1024, options=options, sessions=0) as engine:
        expected = list(turns(engine, 6))
    with opened(model, slots=slots, n_ctx=1024, options=options) as engine:
        assert list(turns(engine, most)) == expected or arch == "gemma3"


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_another_owner_gets_nothing(tiny_model: TinyModel, arch: str) -> None:
    """It gets nothing from the disk or a slot of another owner, and learns nothing from the files."""
    first, model = text(500), tiny_model(arch)
    with opened(model) as engine:
        answer(engine, first, owner="a")
    with opened(model) as engine:
        assert answer(engine, first, owner="b")[1] == 0
        assert answer(engine, first[:300], owner="c")[1] == 0
    with opened(model) as engine:
        assert answer(engine, first, owner="")[1] == 0
    with opened(model) as engine:
        assert answer(engine, first, owner="c")[1] in (299, 300)
    with opened(model) as engine:
        assert answer(engine, first, owner="a")[1] == 499


def test_nothing_is_kept_of_a_request_that_keeps_no_prefix(tiny_model: TinyModel) -> None:
    with opened(tiny_model("llama")) as engine:
        answer(engine, text(500), keep_prefix=False)
    assert not files()


def test_another_model_or_build_gets_nothing(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_model("llama")) as engine:
        answer(engine, text(500))
    for other in ({"seed": 2}, {"quant": "Q8_0"}):
        with opened(tiny_model("llama", **other)) as engine:
            assert answer(engine, text(500))[1] == 0
    known = library.fingerprint()
    monkeypatch.setattr(library, "fingerprint", lambda: known + " newer")
    with opened(tiny_model("llama")) as engine:
        assert answer(engine, text(500))[1] == 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_text(path: Path) -> None:
    """Replace every file by another one, which is whole."""
    if path == files()[0]:
        contents = [each.read_bytes() for each in files()]
        for each, content in zip(files(), [*contents[1:], contents[0]], strict=True):
            each.write_bytes(content)


def folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("arch", "damage"),
    [
        *(("llama", damage) for damage in (flip, cut, other_text, empty, folder_there)),
        ("lfm2", flip),
        ("lfm2", other_text),
    ],
)
def test_damaged_files_cost_evaluating(
    tiny_model: TinyModel, arch: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(arch)
    with opened(model) as engine:
        said, _ = answer(engine, text(500))
        answer(engine, text(500, seed=3))
    for path in files():
        damage(path)
    with opened(model) as engine, caplog.at_level(logging.WARNING, "rest_local.sessions"):
        assert answer(engine, text(500)) == (said, 0)
    if damage not in (empty, folder_there):
        assert "is not used" in caplog.text
    if damage != folder_there:
        with opened(model) as engine:
            again, cached = answer(engine, text(500))
        assert again == said
        assert cached >= PART, "they were written anew"


def test_a_part_that_is_missing_ends_what_is_restored(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with opened(model) as engine:
        said, _ = answer(engine, text(900))
        names = engine.decoder.context.scheduler.slots.sessions.files.names(text(900), "").parts  # type: ignore[union-attr]
    next(path for path in files() if path.stem == names[3]).unlink()
    with opened(model) as engine:
        assert answer(engine, text(900)) == (said, 3 * PART)


def test_a_file_that_disappears_while_it_is_restored(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def deleted(self: cell_files.CellFiles, name: str) -> cell_files.Cells | None:
        self.path(name).unlink()
        return read(self, name)

    model, read = tiny_model("llama"), cell_files.CellFiles._read
    with opened(model) as engine:
        said, _ = answer(engine, text(900))
    monkeypatch.setattr(cell_files.CellFiles, "_read", deleted)
    with opened(model) as engine:
        assert answer(engine, text(900)) == (said, 0)


# The disk


def test_files_are_private_the_bound_is_kept_and_the_newest_stay(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with opened(model) as engine:
        answer(engine, text(512), 1)
    size, home = files()[0].stat().st_size, cache_dir() / "sessions"
    (folder,) = home.iterdir()
    assert {path.stat().st_mode & 0o777 for path in files()} == {0o600}
    assert [home.stat().st_mode & 0o777, folder.stat().st_mode & 0o777] == [0o700, 0o700]
    assert {path.suffix for path in folder.iterdir()} == {".cells"}
    with opened(model, sessions=10 * size + 10) as engine:
        for seed in range(1, 8):
            answer(engine, text(513, seed), 1)
            engine.decoder.context.scheduler.slots.sessions.files.writes.flush(10)  # type: ignore[union-attr]
            assert sum(path.stat().st_size for path in files()) <= 10 * size + 10
    with opened(model, sessions=10 * size + 10) as engine:
        assert answer(engine, text(600, 7), 1)[1] == 513
        assert answer(engine, text(600, 6), 1)[1] == 513
        assert answer(engine, text(600, 1), 1)[1] == 0
    with opened(model, sessions=2 * size + 10):
        pass
    assert len(files()) <= 2


def test_what_is_too_old_goes(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with opened(model) as engine:
        answer(engine, text(512), 1)
    old = time.time() - 86400 * (cell_files.MOST_DAYS + 1)
    for path in files()[:2]:
        os.utime(path, (old, old))
    n = len(files())
    with opened(model):
        pass
    assert len(files()) == n - 2


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_a_full_disk_costs_a_line_and_nothing_else(
    tiny_model: TinyModel, arch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full after some bytes of a file."""
    written = itertools.count()

    def full(write: Callable[[Any], int], data: Any) -> int:
        if next(written) % 3 == 2:
            raise OSError(28, "No space left on device")
        return write(bytes(data)[:1000])

    model = tiny_model(arch)
    with opened(model, slots=2, n_ctx=1024) as engine:
        expected = [answer(engine, text(500, seed))[0] for seed in range(3)]
    for path in files():
        path.unlink()
    with caplog.at_level(logging.WARNING, "rest_local.sessions"), monkeypatch.context() as patched:
        write_with(patched, full)
        with opened(model, slots=2, n_ctx=1024) as engine:
            assert [answer(engine, text(500, seed))[0] for seed in range(3)] == expected
    (told,) = (record.getMessage() for record in caplog.records if record.name == "rest_local.sessions")
    assert told.endswith("No space left on device")
    assert not list((cache_dir() / "sessions").rglob("*.cells*"))
    assert not list((cache_dir() / "sessions").rglob(".*"))


@pytest.mark.parametrize("what", ["write", "read"])
def test_the_end_does_not_wait_for_a_disk_that_hangs(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        go_on.wait()
        raise OSError

    monkeypatch.setattr(cell_files, what, hang)
    kept = cell_files.CellFiles(tmp_path, "of a model", LIMIT)
    if what == "write":
        kept.put("name", Head([1], [1]), [b"cells"])
    else:
        kept.get("name")
    closing = threading.Thread(target=kept.close, args=(0.01,), daemon=True)
    try:
        assert hangs.wait(60)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        assert all(each.daemon for each in threading.enumerate() if "sessions" in each.name), "Python waits for others"
    finally:
        go_on.set()


def test_a_disk_with_little_space_is_left_alone(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = cell_files.shutil.disk_usage
    monkeypatch.setattr(cell_files.shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 20))
    with opened(tiny_model("llama")) as engine:
        answer(engine, text(500))
    assert not files()
    assert "would stay free" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tiny_model: TinyModel) -> None:
    (cache_dir() / "sessions").write_text("in the way")
    with opened(tiny_model("llama")) as engine:
        assert any("no sessions are kept" in warning for warning in engine.warnings)
        answer(engine, text(500))


KILLED = """
    import os, signal, sys
    from rest_local import Engine
    from rest_local.kv_cache import sessions
    sessions.LEAST_TOKENS = 128
    replace, left = os.replace, [int(sys.argv[3])]
    def replace_or_die(new, path):
        if "sessions" in str(path):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(new, path)
    os.replace = replace_or_die
    with Engine.load(sys.argv[1], n_ctx=1024, threads=1, policy="off", sessions=1 << 30) as engine:
        list(engine.generate([int(each) for each in sys.argv[2].split(",")], max_tokens=2, ignore_end=True))
"""


def test_killed_while_it_saves_leaves_whole_files(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """A file under its name is whole and is used. The next engine deletes what is not."""
    model, folder = tiny_model("llama"), cache_dir() / "sessions"
    with opened(model, sessions=0) as engine:
        expected, _ = answer(engine, text(900))
    found = []
    for whole in (0, 5):  # files before the kill
        arguments = [str(model), ",".join(map(str, text(900))), str(whole)]
        child = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), *arguments], check=False)
        assert child.returncode == -9
        assert len(files()) == whole
        assert len(list(folder.rglob(".rest-local-new-*"))) == 1
        with opened(model) as engine, caplog.at_level(logging.WARNING, "rest_local.sessions"):
            sessions = engine.decoder.context.scheduler.slots.sessions
            assert sessions is not None
            sessions.stop_saving()
            said, cached = answer(engine, text(900))
            assert said == expected
            found.append(cached)
        assert not list(folder.rglob(".*"))
        for path in files():
            path.unlink()
    assert found[0] < PART < found[1]
    assert not [record for record in caplog.records if record.name.startswith("rest_local.sessions")]


def test_engines_share_the_folder(tiny_model: TinyModel) -> None:
    """Three at once, with a bound that makes them delete each other's files."""
    model = tiny_model("llama")
    with opened(model, sessions=0) as engine:
        expected = {seed: answer(engine, text(500, seed))[0] for seed in range(6)}
    with opened(model) as engine:
        answer(engine, text(512), 1)
    limit = 9 * files()[0].stat().st_size
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(2):
                with opened(model, sessions=limit) as engine:
                    for _ in range(4):
                        number = rng.randrange(6)
                        assert answer(engine, text(500, number))[0] == expected[number]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(path.stat().st_size for path in files()) <= limit * (1 + 3 / cell_files.SCANNED)


# Beside other requests


@pytest.fixture(params=["llama", "lfm2"])
def service(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Service]:
    model = tiny_model(request.param)
    with opened(model, n_ctx=2048) as engine:
        answer(engine, text(1900), 1)
    with opened(model, n_ctx=2048, slots=3) as engine, Service(engine) as service:
        yield service


def test_others_go_on_while_a_text_is_restored(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes long, and the others get tokens in between."""
    n_files = len(files()) if len(files()) < 3 else 14
    read = cell_files.CellFiles._read
    turn = threading.Semaphore(0)

    def slow(self: cell_files.CellFiles, name: str) -> cell_files.Cells | None:
        assert turn.acquire(timeout=60)
        return read(self, name)

    monkeypatch.setattr(cell_files.CellFiles, "_read", slow)
    other = service.submit(Request(text(20, 5), max_tokens=1900, ignore_end=True))
    next(iter(other))
    restored = service.submit(Request(text(1900), max_tokens=4, ignore_end=True))
    seen = len(other.result.tokens)
    for _ in range(n_files):
        deadline = time.monotonic() + 60
        while len(other.result.tokens) < seen + 2 and not other.done and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(other.result.tokens) >= seen + 2 or other.done  # This thread may be slow.
        assert not restored.result.tokens
        seen = len(other.result.tokens)
        turn.release()
    turn.release()
    list(restored)
    assert restored.result.timings.cached_tokens == 1899
    list(other)
    assert len(other.result.tokens) == 1900


def test_a_request_that_is_cancelled_while_it_is_restored(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    read = cell_files.CellFiles._read
    monkeypatch.setattr(cell_files.CellFiles, "_read", lambda self, name: read(self, name) if held.wait(60) else None)
    stream = service.submit(Request(text(1900), max_tokens=4, ignore_end=True))
    stream.cancel()
    held.set()
    assert service.running == 0
    stream = service.submit(Request(text(1900), max_tokens=4, ignore_end=True))
    list(stream)
    assert stream.result.timings.cached_tokens == 1899


def test_without_room_for_a_text_idle_ones_go(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with opened(model) as engine:
        said, _ = answer(engine, text(900))
    with opened(model, slots=3, cells=1100) as engine:
        answer(engine, text(300, 1), 1)
        assert answer(engine, text(900)) == (said, 899)


def test_an_idle_text_is_saved_while_the_engine_has_nothing_to_do(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "IDLE_S", 0.05)
    with opened(tiny_model("llama")) as engine, Service(engine) as service:
        list(service.submit(Request(text(500), max_tokens=1)))
        deadline = time.monotonic() + 60
        while len(files()) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(files()) == 4
        list(service.submit(Request(text(900), max_tokens=1)))


def test_idle_texts_are_saved_while_others_generate(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "IDLE_S", 0.0)
    monkeypatch.setattr(sessions, "SHARE", 100.0)
    with opened(tiny_model("llama"), slots=2) as engine:
        answer(engine, text(500))
        state = engine.decoder.prepare(Request(text(20, 1), max_tokens=500, ignore_end=True))
        engine.decoder.submit(state)
        while len(files()) < 4 and not state.done:
            engine.decoder.step()
        assert len(files()) == 4
        assert not state.done
        engine.decoder.cancel(state)


def test_after_an_unexpected_error_nothing_is_saved(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_model("llama")) as engine, Service(engine) as service:
        list(service.submit(Request(text(500), max_tokens=1)))
        monkeypatch.setattr(engine.decoder, "step", lambda number: 1 / 0)
        stream = service.submit(Request(text(20), max_tokens=1))
        with pytest.raises(Exception, match="takes no more requests"):
            list(stream)
    assert not files()
