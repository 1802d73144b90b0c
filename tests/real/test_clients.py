"""One `rest-local serve` with a real model, asked by the packages that people use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from support.serving import process

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
QUESTION = "Alice is 31 years old and lives in Rome. Give her data as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Rome", "Paris", "Oslo"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED: Any = [{"role": "user", "content": "What will the weather be in Oslo for the next 3 days?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Returns the weather of a city.", "parameters": WEATHER},
}
GREEDY = {"temperature": 0}
FEW = 12  # tokens


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server that every test of this module asks."""
    with process("-m", str(smollm2), "--alias", "smollm2", "-c", "1024") as server:
        yield server.url()


def satisfies(schema: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Return the JSON of an answer that is valid for the schema."""
    value: dict[str, Any] = json.loads(text or "")
    jsonschema_rs.validate(schema, value)
    return value


def test_three_turns_evaluate_each_message_once(url: str) -> None:
    """What the turns before have evaluated is taken from the KV cache, up to the last few tokens."""
    messages: list[dict[str, Any]] = []
    total = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for question in ("Hi!", "How are you?", "What is the capital of France?"):
            messages.append({"role": "user", "content": question})
            body = {"model": "smollm2", "messages": messages, "max_tokens": 24, "seed": 3}
            answer = client.post("/v1/chat/completions", json=body).json()
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= total
            total = usage["prompt_tokens"]
            messages.append(answer["choices"][0]["message"])
    assert "Paris" in messages[-1]["content"]


def test_openai(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions
        options: Any = {"model": "smollm2", "temperature": 0, "max_tokens": FEW}
        whole = chat.create(messages=MESSAGES, **options).choices[0]
        chunks = list(chat.create(messages=MESSAGES, stream=True, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content != ""
        options["max_tokens"] = 200
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        said = chat.create(messages=[{"role": "user", "content": QUESTION}], response_format=form, **options)
        satisfies(SCHEMA, said.choices[0].message.content)
        with chat.stream(messages=ASKED, tools=[TOOL], tool_choice="required", **options) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    call = (choice.message.tool_calls or [])[0].function
    assert call.name == "weather"
    satisfies(WEATHER, call.arguments)


def test_anthropic(url: str) -> None:
    import anthropic

    tool: Any = {"name": "weather", "description": TOOL["function"]["description"], "input_schema": WEATHER}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        options: Any = {"model": "smollm2", "extra_body": GREEDY}
        whole = client.messages.create(messages=MESSAGES, max_tokens=FEW, **options)
        with client.messages.stream(messages=MESSAGES, max_tokens=FEW, **options) as stream:
            text = "".join(stream.text_stream)
        assert [block.type for block in whole.content] == ["text"]
        assert whole.content[0].text == text != ""  # type: ignore[union-attr]
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        said = client.messages.create(
            messages=[{"role": "user", "content": QUESTION}], max_tokens=200, output_config=form, **options
        )
        satisfies(SCHEMA, said.content[0].text)  # type: ignore[union-attr]
        forced: Any = {"type": "tool", "name": "weather"}
        with client.messages.stream(
            messages=ASKED, max_tokens=200, tools=[tool], tool_choice=forced, **options
        ) as stream:
            for _ in stream:
                pass
            called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    (block,) = called.content
    assert block.type == "tool_use"
    assert block.name == "weather"
    jsonschema_rs.validate(WEATHER, block.input)


def test_ollama(url: str) -> None:
    import ollama

    options = {"temperature": 0, "num_predict": FEW}
    with ollama.Client(host=url) as client:
        whole = client.chat("smollm2", MESSAGES, options=options)
        parts = list(client.chat("smollm2", MESSAGES, options=options, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""
        options["num_predict"] = 200
        asked = [{"role": "user", "content": QUESTION}]
        said = client.chat("smollm2", asked, format=SCHEMA, options=options)  # type: ignore[call-overload]
        satisfies(SCHEMA, said.message.content)
        streamed = list(client.chat("smollm2", ASKED, tools=[TOOL], options=options, stream=True))
    assert streamed[-1].done
    for part in streamed:  # Ollama cannot force a call: the model may answer with text
        for call in part.message.tool_calls or ():
            assert call.function.name == "weather"


def test_llm(url: str, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from llm.cli import cli

    settings = f'- model_id: here\n  model_name: smollm2\n  api_base: "{url}/v1"\n  supports_schema: true\n'
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    runner = CliRunner(env={"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"})
    few = ("-o", "temperature", "0", "-o", "max_tokens", str(FEW))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        question = ["prompt", "-m", "here", MESSAGES[0]["content"], *few]
        streamed, whole = runner.invoke(cli, question), runner.invoke(cli, [*question, "--no-stream"])
        schema = ("--schema", json.dumps(SCHEMA), "-o", "temperature", "0", "-o", "max_tokens", "200")
        said = runner.invoke(cli, ["prompt", "-m", "here", QUESTION, *schema])
    assert (streamed.exit_code, whole.exit_code, said.exit_code) == (0, 0, 0), said.stderr
    assert streamed.stdout.strip() == whole.stdout.strip() != ""
    satisfies(SCHEMA, said.stdout)
