"""A child process that computes with a model crashes, hangs or runs out of memory at each stage; this process survives.

`sandbox.command` starts the child. These tests replace it by a command that fails in chosen settings.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rest_local import sandbox
from rest_local.calibration.settings import SAME, contexts_to_try
from rest_local.decoding.engine import Engine
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.errors import ModelInvalid
from rest_local.llama import load_fallback
from rest_local.llama.context import ContextSettings
from rest_local.llama.library import Device
from rest_local.llama.load_fallback import LoadChoice
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions, Placement

TinyModel = Callable[..., Path]
Task = dict[str, Any]
Breaks = Callable[[Task], str]
BreakWhen = Callable[[Breaks], list[Task]]
SEGV, ABORT, OOM = "kill -SEGV $$", "kill -ABRT $$", "echo 'CUDA error: out of memory' >&2; kill -ABRT $$"
NO_MEMORY = """echo '{"refused": "unable to allocate CUDA0 buffer"}'"""


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model file that no other test has tried, with a cache of its own."""
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    return path


@pytest.fixture
def break_when(monkeypatch: pytest.MonkeyPatch) -> BreakWhen:
    """Return `break_when(rule)`: a child runs the shell commands of `rule` for its task. It returns the tasks."""

    def put(rule: Breaks) -> list[Task]:
        tried: list[Task] = []
        whole = sandbox.command

        def command(module: str, task: str) -> list[str]:
            if module != load_fallback.__name__:
                return whole(module, task)
            tried.append(json.loads(task))
            broken = rule(tried[-1])
            return ["/bin/sh", "-c", broken] if broken else whole(module, task)

        monkeypatch.setattr(sandbox, "command", command)
        return tried

    return put


def uses_flash(task: Task) -> bool:
    return any(each["flash_attention"] for each in task["settings"])


def prints(**seen: object) -> str:
    """Return a shell command that prints a line like the child."""
    return f"echo {shlex.quote(json.dumps(seen))}; "


def choose(path: Path, n_gpu_layers: int = 0, *, exact: bool = False, **fixed: Any) -> LoadChoice:
    options = ModelOptions(**fixed)

    def wanted(tried: ModelOptions) -> Sequence[ContextSettings]:
        return contexts_to_try(tried, 256, 1, 1, None, "exact" if exact else "same")

    return load_fallback.choose(path, n_gpu_layers, options, wanted)


def test_settings_that_work_stay_and_are_tried_once(model: Path, break_when: BreakWhen) -> None:
    tried = break_when(lambda task: "")
    for _ in range(2):
        assert choose(model) == LoadChoice(ModelOptions(), 0)
    assert len(tried) == 1


@pytest.mark.usefixtures("real_children")
def test_the_child_decodes_every_size_in_every_setting(model: Path) -> None:
    task = {
        "path": str(model), "n_gpu_layers": 0, "options": load_fallback.asdict(ModelOptions()),
        "settings": [each.to_dict() for each in contexts_to_try(ModelOptions(), 256, 1, 1, None, "exact")],
    }  # fmt: skip
    ended = sandbox.run(load_fallback.__name__, json.dumps(task), 60)
    stages = [line["at"] for line in ended.lines if "at" in line]
    for flash, cache in (("off", "f16"), ("on", "f16"), ("on", "bf16"), ("on", "q8_0")):
        for n in ("1 token", "2 tokens", "8 tokens", "32 tokens"):
            assert f"decoding {n} (flash attention {flash}, cache {cache})" in stages
    assert ended.lines[-1] == {"done": True}


@pytest.mark.parametrize(
    ("stage", "how"), [("loading it", SEGV), ("decoding 1 token", ABORT), ("decoding 8 tokens", SEGV)]
)
def test_a_crash_with_repacked_weights_turns_repacking_off(
    model: Path, break_when: BreakWhen, stage: str, how: str
) -> None:
    tried = break_when(lambda task: prints(at=stage) + how if task["options"]["repack"] else "")
    for _ in range(2):
        chosen = choose(model)
        assert chosen.options == ModelOptions(repack=False)
        for words in (str(model), "SIG", stage, "weights that are not repacked", "another compiler"):
            assert words in chosen.warning
    assert "\n" not in chosen.warning
    assert len(tried) == 2  # the second call uses the remembered choice


def test_a_model_that_crashes_once_more_is_refused_with_the_way_out(model: Path, break_when: BreakWhen) -> None:
    tried = break_when(lambda task: prints(at="decoding 2 tokens") + SEGV if uses_flash(task) else "")
    with pytest.raises(ModelInvalid, match=r"SIGSEGV.* while decoding 2 tokens; turn `flash_attention` off") as caught:
        choose(model, exact=True)
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [task["options"]["repack"] for task in tried] == [True, False]
    assert choose(model, exact=True, flash_attention="off").warning == ""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parent see a GPU."""
    monkeypatch.setattr(load_fallback.library, "supports_gpu", lambda: True)


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the free bytes of the only GPU, which a test can change."""
    free = [100]
    monkeypatch.setattr(load_fallback.library, "devices", lambda: [Device("GPU0", "a GPU", 1000, free[0])])
    monkeypatch.setattr(load_fallback.library, "gpus", lambda: {"GPU0": 1})
    return free


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("how", [OOM, NO_MEMORY])
def test_a_gpu_without_memory_gets_fewer_layers(model: Path, break_when: BreakWhen, how: str) -> None:
    tried = break_when(lambda task: prints(at="loading it") + how if task["n_gpu_layers"] not in (0, 1) else "")
    chosen = choose(model, -1)  # There are four layers and the output.
    assert (chosen.options, chosen.n_gpu_layers) == (ModelOptions(), 1)
    for words in ("1 of 5 layers on the GPU", "`n_gpu_layers`"):
        assert words in chosen.warning
    assert [task["n_gpu_layers"] for task in tried] == [-1, 2, 1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("fits", "free", "trials"),
    [(True, 100, 0), (True, 95, 0), (True, 80, 1), (True, 120, 0), (False, 105, 0), (False, 80, 2), (False, 120, 2)],
)
def test_a_choice_is_tried_again_when_the_memory_of_a_gpu_changes(
    model: Path, break_when: BreakWhen, gpu_memory: list[int], fits: bool, free: int, trials: int
) -> None:
    """If all layers fitted, only less memory matters, and otherwise less or more."""
    tried = break_when(lambda task: prints(done=True) + "exit 0" if fits or task["n_gpu_layers"] == 2 else NO_MEMORY)
    chosen = choose(model, -1)
    assert fits or chosen.n_gpu_layers == 2
    before = len(tried)
    gpu_memory[0] = free
    assert choose(model, -1) == chosen
    assert len(tried) == before + trials


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_fails_is_not_used(model: Path, break_when: BreakWhen) -> None:
    break_when(lambda task: prints(at="loading it") + ABORT if task["options"]["devices"] != ["none"] else "")
    chosen = choose(model, 3, tensor_split=(1.0,), override_tensor=(Placement("x", "CPU"),))
    assert chosen.n_gpu_layers == 0
    assert chosen.options == ModelOptions(devices=("none",), kv_offload=False)
    assert "on the CPU alone" in chosen.warning


@pytest.mark.usefixtures("gpu")
def test_a_child_that_hangs_is_killed_and_reported(
    model: Path, break_when: BreakWhen, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = model.with_name("pids")
    tried = break_when(lambda task: prints(at="decoding 8 tokens") + f"echo $$ >> {pids}; exec sleep 600")
    monkeypatch.setattr(load_fallback, "TIMEOUT_SECONDS", 0.5)
    with pytest.raises(ModelInvalid, match="did not finish in 1 s while decoding 8 tokens"):
        choose(model, -1)
    assert len(tried) == 2
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_refusal_of_llama_cpp_is_left_to_the_parent_and_not_remembered(model: Path, break_when: BreakWhen) -> None:
    tried = break_when(lambda task: """echo '{"refused": "no such device"}'""")
    for _ in range(2):
        assert choose(model) == LoadChoice(ModelOptions(), 0)
    assert len(tried) == 2


def test_a_draft_model_is_tried_too(model: Path, break_when: BreakWhen, caplog: pytest.LogCaptureFixture) -> None:
    break_when(lambda task: SEGV if task["options"]["repack"] else "")
    with Model.open(model, vocab_only=True) as target:
        drafter = DraftModel.open(model, target.vocabulary, 64, 1, threads=1)
    assert not drafter.model.options.repack
    assert "weights that are not repacked" in caplog.text
    drafter.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"options": {"x": 1}, "free": []}', b"\xff"])
def test_a_damaged_record_is_tried_again(model: Path, break_when: BreakWhen, content: bytes) -> None:
    tried = break_when(lambda task: "")
    choose(model)
    (kept,) = (model.parent / "cache").glob("loading-*.json")
    kept.write_bytes(content)
    choose(model)
    assert len(tried) == 2


def test_an_engine_answers_in_what_is_left_and_warns_once(model: Path, break_when: BreakWhen) -> None:
    break_when(lambda task: SEGV if task["options"]["repack"] else "")
    with Engine.load(model, n_ctx=128, threads=1) as engine:
        assert not engine.model.options.repack
        assert len([task for task in engine.warnings if "SIGSEGV" in task]) == 1
        stream = engine.generate("a", max_tokens=4)
        assert "".join(piece.text for piece in stream) == stream.result.text


def test_a_child_that_really_dies_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real child kills itself by a real signal in the middle of the second decode."""
    program = (
        "import os, signal, sys; from rest_local.llama import context, load_fallback\n"
        "decode = context.Context.decode\n"
        "def dies(self):\n"
        "    if self.batch.n_tokens == 2 and self._model.options.repack: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return decode(self)\n"
        "context.Context.decode = dies\n"
        "load_fallback.main(sys.argv[1])"
    )
    whole = sandbox.command
    monkeypatch.setattr(
        sandbox,
        "command",
        lambda module, task: (
            [sys.executable, "-c", program, task] if module == load_fallback.__name__ else whole(module, task)
        ),
    )
    chosen = choose(model)
    assert chosen.options == ModelOptions(repack=False)
    assert f"crashed (SIGSEGV) while decoding 2 tokens (flash attention on, cache {SAME[0][1]})" in chosen.warning
