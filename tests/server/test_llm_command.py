"""Simon Willison's `llm` command line against the demo model, as its users set it up."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from live import Live

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="llm is not installed")


@pytest.fixture
def llm(demo: Live, tmp_path: Path) -> Callable[..., str]:
    """Runs one command line of it, with a folder of its own."""
    models = f"- model_id: here\n  model_name: demo\n  api_base: {demo.url}/v1\n  supports_schema: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models, encoding="utf-8")

    def run(*arguments: str, stdin: str = "") -> str:
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "dummy"}
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=False, input=stdin
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("stream", [(), ("--no-stream",)])
def test_a_prompt_is_answered(llm: Callable[..., str], stream: tuple[str, ...]) -> None:
    options = ("-o", "max_tokens", "12", "-o", "temperature", "0", "-o", "seed", "1")
    assert llm("-m", "here", *options, *stream, "Write a function that adds two numbers.").strip()


def test_a_conversation_goes_on(llm: Callable[..., str]) -> None:
    llm("-m", "here", "-o", "max_tokens", "8", "-s", "You write Python.", "Add two numbers.")
    assert llm("-c", "-o", "max_tokens", "8", "Now multiply them.").strip()
    assert "Add two numbers." in llm("logs", "list", "-n", "2")


def test_a_schema_is_kept(llm: Callable[..., str]) -> None:
    import json

    text = llm(
        "-m", "here", "--no-stream", "-o", "max_tokens", "200", "-o", "temperature", "0", "--schema", "n int", "x"
    )
    assert isinstance(json.loads(text)["n"], int)
