"""`rest-local generate` with a fake engine: what is read, what is printed, what is passed on."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cli_engine import HELLO, Call, FakePiece, Install

from rest_local.errors import PromptTooLong, in_options
from rest_local.grammar import gbnf
from rest_local.llama.options import Sampling


def test_text_is_streamed_and_ends_with_a_newline(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("generate", "def f():")
    assert (done.code, done.out, done.err) == (0, "Hello\n", "")
    assert engine.prompts == ["def f():"]
    assert engine.closed


@pytest.mark.parametrize(("at_terminal", "shown"), [(True, "a\ufffd[31mb\ufffd\tc\n"), (False, "a\x1b[31mb\x07\tc\n")])
def test_escape_sequences_of_a_model_reach_a_pipe_and_no_terminal(
    fake_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch, at_terminal: bool, shown: str
) -> None:
    fake_engine([FakePiece("a\x1b[31", (1,), ("target",)), FakePiece("mb\x07\tc", (2,), ("target",))])
    monkeypatch.setattr("sys.stdout.isatty", lambda: at_terminal)
    assert call("generate", "x", "-q").out == shown


def test_json_is_one_line_and_nothing_else(fake_engine: Install, call: Call) -> None:
    fake_engine()
    done = call("generate", "x", "--json")
    assert done.out.count("\n") == 1
    answer = json.loads(done.out)
    assert (answer["text"], answer["finish_reason"]) == ("Hello", "stop")
    assert answer["draft"]["by_source"]["datastore"]["accepted"] == 2


@pytest.mark.parametrize("arguments", [("generate", "-"), ("generate",)])
def test_prompt_is_read_from_a_pipe(fake_engine: Install, call: Call, arguments: tuple[str, ...]) -> None:
    engine = fake_engine()
    assert call(*arguments, stdin="naïve\n".encode()).code == 0
    assert engine.prompts == ["naïve\n"]


def test_an_empty_pipe_is_no_prompt(call: Call) -> None:
    done = call("generate", stdin=b"")
    assert (done.code, "the standard input is empty; give a PROMPT" in done.err) == (2, True)


def test_invalid_utf8_on_stdin_is_replaced_with_one_warning(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("generate", "-", stdin=b"a\xff\xfeb")
    assert engine.prompts == ["a��b"]
    assert done.err == "rest-local: warning: stdin: not UTF-8 at byte 1; invalid bytes were replaced\n"
    assert done.code == 0


def test_a_true_lone_surrogate_never_reaches_the_engine(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    assert call("generate", "a\ud800b").code == 0
    engine.prompts[0].encode("utf-8")


def test_sampling_options_reach_the_engine(fake_engine: Install, call: Call, tmp_path: Path) -> None:
    engine = fake_engine()
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "a"')
    given = shlex.split(
        "--temp 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 3 --repeat-penalty 1.1 --repeat-last-n 32"
        " --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 15=-1.5 --logit-bias 16=-inf"
        " --stop A --stop B -n 7"
    )
    assert call("generate", "x", *given, "--grammar-file", str(grammar)).code == 0
    assert engine.arguments == [
        {
            "max_tokens": 7,
            "stop": ("A", "B"),
            "sampling": Sampling(
                temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, repeat_penalty=1.1, repeat_last_n=32,
                presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((15, -1.5), (16, float("-inf"))),
                grammar=gbnf('root ::= "a"'),
            ),
            "prediction": "",
        }
    ]  # fmt: skip


def test_an_answer_that_repeats_itself_says_so(fake_engine: Install, call: Call) -> None:
    fake_engine([FakePiece("la ", (5, 6), ("target", "target"))] * 200)
    done = call("generate", "sing")
    assert (done.out, done.err) == ("la " * 200 + "\n", "rest-local: the answer repeats itself\n")


def test_names_that_people_type_are_understood(fake_engine: Install, call: Call, tmp_path: Path) -> None:
    engine = fake_engine()
    engine.model.chat_template = "fake"
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    for command in (("generate",), ("chat", "-sys", "be brief"), ("chat", "--system-prompt", "be brief")):
        given = ("--max-tokens", "7", "--temperature", "0.5", "--json-schema-file", str(schema), "-m", "a.gguf")
        assert call(*command, "x", *given).code == 0
    assert {arguments["max_tokens"] for arguments in engine.arguments} == {7}
    assert {arguments["sampling"].temperature for arguments in engine.arguments} == {0.5}
    assert {arguments["sampling"].grammar.source for arguments in engine.arguments} == {"{}"}
    assert [messages[0]["content"] for messages in engine.messages] == ["be brief", "be brief"]


def test_samplers_of_llama_cpp_have_its_names(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    given = shlex.split(
        "--temperature 0.5 -s 3 --typical 0.9 --top-nsigma 2 --xtc-probability 0.5 --xtc-threshold 0.25"
        " --dynatemp-range 0.5 --dynatemp-exp 2 --dry-multiplier 0.5 --dry-base 2 --dry-allowed-length 3"
        " --dry-penalty-last-n -1 --dry-sequence-breaker ; --adaptive-target 0.5 --adaptive-decay 0.5"
        " --samplers 'dry;typ_p;top-n-sigma;xtc;temperature'"
    )
    assert call("generate", "x", *given).code == 0
    assert call("generate", "x", "--mirostat", "2", "--mirostat-ent", "3", "--mirostat-lr", "0.5").code == 0
    assert call("generate", "x", "--dry-sequence-breaker", "none").code == 0
    assert [arguments["sampling"] for arguments in engine.arguments] == [
        Sampling(
            temperature=0.5, seed=3, typical_p=0.9, top_n_sigma=2.0, xtc_probability=0.5, xtc_threshold=0.25,
            dynatemp_range=0.5, dynatemp_exponent=2.0, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=3,
            dry_penalty_last_n=-1, dry_sequence_breakers=(";",), adaptive_target=0.5, adaptive_decay=0.5,
            samplers=("dry", "typ_p", "top_n_sigma", "xtc", "temperature"),
        ),
        Sampling(temperature=0.8, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5),
        Sampling(temperature=0.8, dry_sequence_breakers=()),
    ]  # fmt: skip
    done = call("generate", "x", "--samplers", "top_k;tfs_z")
    assert (done.code, done.err.count("\n"), "tfs_z" in done.err) == (2, 1, True)


@pytest.mark.parametrize("option", ["--grammar-file", "--json-schema", "--prediction"])
@pytest.mark.parametrize(
    ("name", "cause"), [("none", "No such file"), (".", "Is a directory"), ("bytes", "not UTF-8 text at byte 1")]
)
def test_a_file_that_cannot_be_read_is_refused_by_every_option(
    fake_engine: Install, call: Call, tmp_path: Path, option: str, name: str, cause: str
) -> None:
    engine = fake_engine()
    (tmp_path / "bytes").write_bytes(b"a\xff")
    done = call("generate", "x", option, str(tmp_path / name))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"{tmp_path / name}: {cause}" in done.err
    assert not engine.prompts


def test_a_prediction_is_read_from_a_pipe_or_a_file(fake_engine: Install, call: Call, tmp_path: Path) -> None:
    engine = fake_engine()
    (tmp_path / "old.py").write_text("x = 1\n")
    for given in ("-", str(tmp_path / "old.py")):
        assert call("generate", "x", "--prediction", given, stdin=b"x = 1\n").code == 0
        assert (engine.prompts[-1], engine.arguments[-1]["prediction"]) == ("x", "x = 1\n")


def test_refusal_of_the_engine_is_one_line_and_exit_1(fake_engine: Install, call: Call) -> None:
    engine = fake_engine([PromptTooLong(900, 64)])
    done = call("generate", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"rest-local: error: {in_options(str(PromptTooLong(900, 64)))}\n"
    assert engine.closed


def test_interrupt_keeps_the_text_so_far_and_exits_130(fake_engine: Install, call: Call) -> None:
    engine = fake_engine([HELLO[0], KeyboardInterrupt()])
    done = call("generate", "x")
    assert (done.code, done.out, done.err) == (130, "Hel\n", "")
    assert engine.closed


def test_instruct_puts_the_prompt_into_the_template(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    assert call("generate", "-m", "m.gguf", "--instruct", "say hello").code == 0
    assert engine.prompts == ["<user>say hello<assistant>"]


def test_an_empty_answer_is_said(fake_engine: Install, call: Call) -> None:
    fake_engine([])
    done = call("generate", "x")
    assert (done.code, done.out, done.err) == (0, "\n", "rest-local: the model gave an empty answer\n")


def test_a_context_that_is_full_is_said_and_a_limit_is_not(call: Call, tiny_model: Callable[[str], Path]) -> None:
    options = ("-m", str(tiny_model("llama")), "-c", "32", "--temp", "0", "--no-history")
    full = "rest-local: the answer was cut off: the context is full (--ctx)\n"
    assert full in call("generate", *options, "-n", "-1", "def").err
    assert full not in call("generate", *options, "-n", "4", "def").err
