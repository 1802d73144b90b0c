"""How -m and -d are resolved, and which datastores are opened."""

import logging
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cli_engine import Call, Install

import rest_local.decoding.engine
from rest_local.cli import opening, serve
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.verify import Relaxed
from rest_local.errors import ModelError
from rest_local.llama.options import Adapter, ModelOptions, Override, Placement, Rope
from rest_local.retrieval import home


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Record the engines that are opened. What becomes of a datastore that does not fit is in test_missing."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig, unusable: object) -> Any:
        configs.append(config)
        return SimpleNamespace(warnings=["one thing"])

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_the_default_datastore_is_opened_where_there_is_one(
    opened: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "list_datastores", lambda: ["default"])
    opening.open_engine(EngineConfig(model="m.gguf"))
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    opening.open_engine(EngineConfig(model="m.gguf", datastores=("mine",)))
    assert [config.datastores for config in opened] == [("default",), (), ("mine",)]
    assert capsys.readouterr().err == "rest-local: warning: one thing\n" * 3


def test_warnings_of_the_log_are_shown_but_not_those_of_llama_cpp(
    opened: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    opening.open_engine(EngineConfig(model="m.gguf", policy="off"))
    capsys.readouterr()
    logging.getLogger("rest_local.drafting").warning("a datastore %s", "broke")
    logging.getLogger("rest_local.drafting").info("nothing to see")
    logging.getLogger("rest_local.llama").warning("n_ctx_seq < n_ctx_train")
    assert capsys.readouterr().err == "rest-local: warning: a datastore broke\n"


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Return the engines that commands ask for, without opening any."""
    configs: list[EngineConfig] = []

    def engine(config: EngineConfig, unusable: object) -> Any:
        configs.append(config)
        raise ModelError("as far as here")

    monkeypatch.setattr(rest_local.decoding.engine, "Engine", engine)
    return configs


def test_options_are_the_fields_of_the_config(asked_for: list[EngineConfig], call: Call) -> None:
    given = shlex.split(
        "-m ~/m.gguf -d /tmp/a -d b --ctx 512 -t 2 -ngl 0 --policy off --verify relaxed:5,0.25"
        " -md d.gguf -ngld all --no-history"
    )
    assert call("generate", "x", *given).err.endswith("error: as far as here\n")
    assert asked_for == [
        EngineConfig(
            model=Path("~/m.gguf").expanduser(), datastores=("/tmp/a", "b"), follow=True, n_ctx=512,
            threads=2, n_gpu_layers=0, policy="off", verify=Relaxed(5, 0.25), draft_model="d.gguf",
            draft_gpu_layers=-1,
        )
    ]  # fmt: skip


def test_serve_and_batch_take_sampling_options_as_defaults_of_requests(
    asked_for: list[EngineConfig], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice(named: object, config: EngineConfig, *others: object) -> None:
        asked_for.append(config)
        raise ModelError("as far as here")

    monkeypatch.setattr(serve, "choice", choice)
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "x"}\n')
    given = ("-m", "m.gguf", "--temp", "0", "--seed", "5")
    for command in (("serve", "--port", "0"), ("batch", str(requests), "-o", str(tmp_path / "out"))):
        assert call(*command, *given).err.endswith("error: as far as here\n")
    assert [config.sampling for config in asked_for] == [{"temperature": 0.0, "seed": 5}] * 2


def test_every_option_reaches_the_engine(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call(
        "generate", "x", "--lora", "a.gguf", "--lora", "b c.gguf", "--lora-scaled", "d.gguf:0.5", "--no-mmap",
        "--mlock", "--check-tensors", "--no-repack", "--override-kv", "llama.context_length=int:9", "-sm", "row", "-ts",
        "3,1", "-mg", "1", "-cmoe", "-ncmoe", "2", "-ot", "exps=CPU", "--numa", "isolate", "-tb", "3", "-fa", "on",
        "-ctk", "q8_0", "-ctv", "q4_0", "-b", "256", "-ub", "64", "-nkvo", "--rope-scaling", "yarn", "--rope-scale",
        "4", "--rope-freq-base", "1e6", "--yarn-orig-ctx", "512", "--yarn-ext-factor", "1", "--yarn-attn-factor", "0.5",
        "--yarn-beta-slow", "2", "--yarn-beta-fast", "16", "-dev", "CUDA0, CUDA1", "--rollback", "4",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert engine.config.options == ModelOptions(
        mmap=False, mlock=True, check_tensors=True, repack=False, split_mode="row", tensor_split=(3.0, 1.0), main_gpu=1,
        override_kv=(Override("llama.context_length", "int", 9),), cpu_moe=True, n_cpu_moe=2, numa="isolate",
        lora=(Adapter(Path("a.gguf")), Adapter(Path("b c.gguf")), Adapter(Path("d.gguf"), 0.5)),
        override_tensor=(Placement("exps", "CPU"),), n_batch=256, n_ubatch=64, threads_batch=3, flash_attention="on",
        cache_type_k="q8_0", cache_type_v="q4_0", kv_offload=False,
        rope=Rope("yarn", 1e6, 0.25, 512, 1.0, 0.5, 2.0, 16.0), devices=("CUDA0", "CUDA1"), rollback=4,
    )  # fmt: skip


def test_the_environment_sets_them_too(fake_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    for name, value in {
        "LORA": "a.gguf:b.gguf",
        "LORA_SCALED": "c.gguf:2 d.gguf:3",
        "CACHE_TYPE_K": "q8_0",
        "MMAP": "0",
        "KV_OFFLOAD": "0",
        "FLASH_ATTN": "off",
    }.items():
        monkeypatch.setenv(f"REST_LOCAL_{name}", value)
    assert call("doctor").code == 0
    options = engine.config.options
    assert [(str(a.path), a.scale) for a in options.lora] == [
        ("a.gguf", 1), ("b.gguf", 1), ("c.gguf", 2), ("d.gguf", 3),
    ]  # fmt: skip
    assert (options.cache_type_k, options.mmap, options.kv_offload) == ("q8_0", False, False)
    assert options.flash_attention == "off"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-ctk q3", "q3"), ("-fa maybe", "maybe"), ("-fa off -ctv q8_0", "needs flash attention"),
        ("-ts a,b", "--tensor-split"), ("-ts 0,0", "above 0"), ("--override-kv x", "KEY=TYPE:VALUE"),
        ("--override-kv x=int:y", "no int"), ("-ot x", "PATTERN=BUFFER"), ("--lora-scaled x", "FILE:SCALE"),
        ("--lora-scaled x:nan", "finite"), ("--rope-scale 0", "positive"),
        ("--rope-scale 2 --rope-freq-scale 0.5", "give one"), ("--rope-freq-base -1", "freq base"), ("-b 0", "0"),
        ("-dev none,CUDA0", "none alone"), ("-ngl many", "all, or auto"), ("--ctx-size -1", "-1"), ("-tb x", "x"),
        ("-mg -1", "-1"), ("--numa x", "x"), ("--exact --verify relaxed", "exact"), ("--verify loose", "loose"),
        ("--policy best", "best"), ("--logit-bias x=1", "is not TOKEN=BIAS"), ("--logit-bias 15", "is not TOKEN=BIAS"),
        ("--top-k many", "many"), ("-n -2", "-2"), ("--stop ''", "some text"), ("--top-p 2", "2"),
        ("--temp nan", "nan"), ("--no-such-option", "--no-such-option"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_before_a_model_is_opened(call: Call, options: str, said: str) -> None:
    done = call("generate", "x", "-m", "/nowhere/model.gguf", *shlex.split(options))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert said in done.err
    assert "nowhere" not in done.err


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (("--ctx-size", "512"), "n_ctx", 512),
        (("-c", "0"), "n_ctx", "trained"),
        (("--n-gpu-layers", "7"), "n_gpu_layers", 7),
        (("-ngl", "all"), "n_gpu_layers", -1),
        (("-ngl", "auto"), "n_gpu_layers", None),
        (("-ngld", "all"), "draft_gpu_layers", -1),
        ((), "history", True),
        (("--no-history",), "history", False),
    ],
)
def test_generate_and_chat_have_the_same_options_with_the_usual_names(
    fake_engine: Install, call: Call, given: tuple[str, ...], field: str, value: Any
) -> None:
    engine = fake_engine()
    engine.model.chat_template = "fake"
    for command in ("generate", "chat"):
        assert call(command, "x", "-m", "m.gguf", *given).code == 0
        assert getattr(engine.config, field) == value
