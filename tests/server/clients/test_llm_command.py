"""The `llm` command line in this process, with the configuration that docs/CLIENTS.md gives."""

import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from click.testing import CliRunner, Result
from live import Live, prompt_of

pytestmark = pytest.mark.skipif(find_spec("llm") is None, reason="the package llm is not installed")
Llm = Callable[..., Result]
TOOL = """
def word_count(text: str) -> int:
    "Counts words."
    return len(text.split())
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """Return `llm(live, "prompt", "-o", "temperature", "0")`. There is one home, since its first use takes a second."""
    home = tmp_path_factory.mktemp("llm")

    def run(live: Live, *arguments: str) -> Result:
        from llm.cli import cli

        settings = f'- model_id: rest-local\n  model_name: demo\n  api_base: "{live.url}/v1"\n'
        settings += "  supports_tools: true\n  supports_schema: true\n"
        (home / "extra-openai-models.yaml").write_text(settings)
        runner = CliRunner(env={"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "any"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return runner.invoke(cli, ["prompt", "-m", "rest-local", *arguments])

    return run


def test_it_prompts_and_streams(demo: Live, llm: Llm) -> None:
    options = ("def add(a, b):", "-o", "max_tokens", "12", "-o", "temperature", "0")
    streamed, whole = llm(demo, *options), llm(demo, *options, "--no-stream")
    assert streamed.exit_code == 0, streamed.stderr
    assert whole.exit_code == 0, whole.stderr
    assert streamed.stdout.strip()
    assert whole.stdout.strip()


def test_it_sends_a_schema(demo: Live, llm: Llm) -> None:
    done = llm(demo, "number", "--schema", json.dumps({"type": "object", "properties": {"small": {"type": "boolean"}}}))
    assert done.exit_code == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_it_continues_a_conversation(demo: Live, llm: Llm) -> None:
    first = llm(demo, "Add two numbers.", "-s", "You write Python.", "-o", "max_tokens", "8")
    assert first.exit_code == 0, first.stderr
    second = llm(demo, "Now multiply them.", "-c", "-o", "max_tokens", "8")
    assert second.exit_code == 0, second.stderr
    assert second.stdout.strip()


def test_it_calls_a_tool_and_continues(hello: Live, llm: Llm) -> None:
    """Two requests: the second has the call and its result in the conversation."""
    call = '<tool_call>\n{"name": "word_count", "arguments": {"text": "one two three"}}\n</tool_call>'

    class Turns:
        """What the model says: a call, then a sentence."""

        said = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            self.said += 1
            return iter((call,) if self.said == 1 else ("Three words.",))

    hello.service.answer = Turns()
    done = llm(hello, "How many words?", "--functions", TOOL)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip().endswith("Three words.")
    prompt = prompt_of(hello, 1)
    assert "word_count" in prompt
    assert "3" in prompt.rpartition("word_count")[2], "the result is in the prompt"


def test_it_shows_the_error_message(hello: Live, llm: Llm) -> None:
    done = llm(hello, "hi", "-o", "max_tokens", "-7")
    assert done.exit_code != 0
    assert "max_tokens" in done.stderr
