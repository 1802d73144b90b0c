"""Options from the environment and the configuration file: which value counts, and what is said of a wrong file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call, Install

from rest_local.cli.main import cli
from rest_local.cli.sections import options_by_key
from rest_local.cli.settings import matches


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes the configuration."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("REST_LOCAL_CONFIG", str(path))
    monkeypatch.delenv("REST_LOCAL_MODEL")

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return write


@pytest.fixture
def taken(fake_engine: Install, call: Call) -> Callable[..., Any]:
    """Return a function that runs `generate` and returns the configuration and the options of its engine."""

    def run(*arguments: str) -> Any:
        engine = fake_engine()
        done = call("generate", "x", *arguments)
        assert done.code == 0, done.err
        return engine

    return run


def test_the_file_gives_what_the_command_line_does_not(file: Callable[[str], Path], taken: Callable[..., Any]) -> None:
    file(
        'ctx = 512\ndatastore = ["a", "b"]\nhistory = false\ntensor-split = "3,1"\nlogit-bias = ["15=-inf"]\ntemp = 1\n'
    )
    config = taken().config
    assert (config.n_ctx, config.datastores, config.history) == (512, ("a", "b"), False)
    assert config.options.tensor_split == (3.0, 1.0)
    config = taken("-c", "1024", "--history").config
    assert (config.n_ctx, config.datastores, config.history) == (1024, ("a", "b"), True)


def test_precedence(file: Callable[[str], Path], taken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, environment, profile of the model, file, default: each is taken away in turn."""
    path = file('ctx = 512\n\n[profile."qwen*"]\nctx = 1024\n')
    monkeypatch.setenv("REST_LOCAL_CTX", "2048")
    assert taken("-m", "Qwen2.gguf", "-c", "256").config.n_ctx == 256
    assert taken("-m", "Qwen2.gguf").config.n_ctx == 2048
    monkeypatch.delenv("REST_LOCAL_CTX")
    assert taken("-m", "Qwen2.gguf").config.n_ctx == 1024
    assert taken("-m", "llama.gguf").config.n_ctx == 512
    path.unlink()
    assert taken("-m", "Qwen2.gguf").config.n_ctx is None


@pytest.mark.parametrize("given", ["flag", "environment", "file"])
def test_the_profile_is_that_of_the_model_however_it_is_named(
    file: Callable[[str], Path], taken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    top = 'model = "/models/Qwen2.gguf"\n' if given == "file" else 'model = "other.gguf"\n'
    file(f'{top}[profile."qwen*"]\nctx = 1024\n')
    if given == "environment":
        monkeypatch.setenv("REST_LOCAL_MODEL", "dir/qwen.gguf")
    assert taken(*(["-m", "qwen3"] if given == "flag" else [])).config.n_ctx == 1024


@pytest.mark.parametrize(
    ("glob", "model", "expected"),
    [
        ("qwen*", "/models/Qwen2.5-Coder-Q4_K_M.gguf", True),
        ("Qwen2.5-Coder-Q4_K_M", "/models/qwen2.5-coder-q4_k_m.GGUF", True),
        ("*q4_k_m*", "bartowski/Qwen2.5-7B-GGUF:Q4_K_M", True),
        ("bartowski/*", "bartowski/Qwen2.5-7B-GGUF:Q4_K_M", True),
        ("bartowski/*", "other/Qwen2.5-7B-GGUF:Q4_K_M", False),
        ("/models/*", "/models/a.gguf", True), ("a.gguf", "C:\\models\\a.gguf", True), ("SmolLM2", None, True),
        ("qwen", "qwen2", False), ("llama3:8b", "llama3:8b", True),
    ],
)  # fmt: skip
def test_names_of_a_model(glob: str, model: str | None, expected: bool) -> None:
    assert matches(glob, model) is expected


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("ctx = 4096\ntop_k = 20\n", 2, "unknown key top_k; write top-k"),
        ("no-history = true\n", 1, "unknown key no-history; write history = false"),
        ("\n\ntopk = 3\n", 3, "unknown key topk; did you mean top-k? `rest-local config show --all` lists the keys"),
        ("colour = 3\n", 1, "unknown key colour; "),
        ('ctx = "many"\n', 1, "ctx: 'many' is not a valid integer"),
        ("ctx = true\n", 1, "ctx: 'true' is not a valid integer"),
        ("ctx = -1\n", 1, "ctx: -1 is not in the range x>=0"),
        ("ctx = [1, 2]\n", 1, "ctx: takes one value, not a list"),
        ("# a\nhistory = 3\n", 2, "history: '3' is not a valid boolean"),
        ("tensor-split = {a = 1}\n", 1, "tensor-split: takes one value, not a table"),
        ('policy = "fast"\n', 1, "policy: 'fast' is not one of 'auto'"),
        ("logit-bias = [\n  '1=1',\n  3,\n]\n", 4, "logit-bias: '3' is not TOKEN=BIAS"),
        ("ctx = 1979-05-27\n", 1, "ctx: '1979-05-27' is not a valid integer"),
        ('gpu-layers = "some"\n', 1, "gpu-layers: 'some' is not a number of layers"),
        ('logit-bias = ["x"]\n', 1, "logit-bias: 'x' is not TOKEN=BIAS"),
        ('[profile."smollm2"]\nctx = "x"\n', 2, "ctx: 'x' is not a valid integer"),
        ('ctx = 1\n[profile."q*"]\nmodel = "x"\n', 3, "model: the model chooses the profile"),
        ("[profile]\nctx = 3\n", 1, 'write [profile."GLOB"]'),
        ("ctx = \n", 1, "not TOML: "),
        ("ctx = 1\nctx = 2\n", 2, "not TOML: "),
        ("ctx = 1\n[profile\n", 2, "not TOML: "),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(
    file: Callable[[str], Path], call: Call, fake_engine: Install, text: str, line: int, message: str
) -> None:
    path = file(text)
    fake_engine()
    done = call("generate", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"rest-local: error: configuration {path}:{line}: {message}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"ctx = 1\nsystem = '\xff'\n", b"\x00\x01\x02", b"ctx = 1\r\n\x1b[31mtop = 2\r\n"])
def test_a_file_of_other_bytes_is_one_line(
    file: Callable[[str], Path], call: Call, fake_engine: Install, content: bytes
) -> None:
    file("").write_bytes(content)
    fake_engine()
    done = call("generate", "x")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "\x1b" not in done.err


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("generate", "--help"), ("--version",), ("config", "path"), ("config", "show", "--help"),
     ("completion", "fish"), ("config", "--help")],
    ids=" ".join,
)  # fmt: skip
def test_a_damaged_file_does_not_stop_what_does_not_need_it(
    file: Callable[[str], Path], call: Call, arguments: tuple[str, ...]
) -> None:
    file("ctx = = 3\n")
    done = call(*arguments)
    assert (done.code, done.err) == (0, "")


def test_show_says_where_each_value_comes_from(
    file: Callable[[str], Path], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file('model = "/models/a.gguf"\ntemp = 0.7\n[profile."qwen*"]\nctx = 32768\n')
    monkeypatch.delenv("REST_LOCAL_NO_CODE")
    monkeypatch.setenv("REST_LOCAL_TOP_K", "20")
    monkeypatch.setenv("REST_LOCAL_TEMP", "")  # empty, as none
    assert [line.split(maxsplit=2) for line in call("config", "show").out.splitlines()] == [
        ["model", '"/models/a.gguf"', f"{path}:1"],
        ["temp", "0.7", f"{path}:2"],
        ["top-k", '"20"', "environment, REST_LOCAL_TOP_K"],
    ]
    lines = call("config", "show", "-m", "dir/Qwen3.gguf", "ctx", "max-body").out.splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [
        ["ctx", "32768", f'{path}:4, profile "qwen*"'],
        ["max-body", "8388608", "default"],
    ]


@pytest.mark.parametrize("text", ["ctx = 'x'\n", "[profile.a]\ntopk = 3\n", "ctx =\n"])
def test_show_checks_the_whole_file(file: Callable[[str], Path], call: Call, text: str) -> None:
    path = file(text)
    done = call("config", "show")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith(f"rest-local: error: configuration {path}:")


def test_what_deletes_or_overwrites_without_asking_has_no_key() -> None:
    assert not {"yes", "all", "force", "replace", "overwrite"} & options_by_key(cli).keys()
