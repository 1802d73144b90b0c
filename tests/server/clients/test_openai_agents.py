"""OpenAI's Agents SDK runs an agent with a tool: the package itself, in a Python of its own, with a scripted model.

`python -m venv DIR; DIR/bin/pip install openai-agents; REST_LOCAL_OPENAI_AGENTS=DIR/bin/python make test`. Skipped
without one.
"""

from __future__ import annotations

import json
from pathlib import Path

from agents import answering, program, run
from live import Scripted

SCRIPT = """
import asyncio, sys
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def read_file(path: str) -> str:
    "Reads a file."
    return "x = 41 + 1"


async def main():
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    agent = Agent(name="reader", instructions="Be brief.", tools=[read_file], model=model)
    whole = await Runner.run(agent, "What is x?")
    streamed = Runner.run_streamed(agent, "What is x?")
    async for _ in streamed.stream_events():
        pass
    chained = await Runner.run(agent, "What is x?", auto_previous_response_id=True)
    print(whole.final_output, streamed.final_output, chained.final_output, sep="|")


asyncio.run(main())
"""
ARGUMENTS = json.dumps({"name": "read_file", "arguments": {"path": "a.py"}})
CALL = f"<think>Hm.</think><tool_call>\n{ARGUMENTS}\n</tool_call>"


def test_an_agent_calls_its_tool(scripted: Scripted, tmp_path: Path) -> None:
    """Whole, streamed, and with `previous_response_id`: each is a call, and an answer to its result."""
    live = scripted(n_ctx=8192)
    (tmp_path / "run.py").write_text(SCRIPT)
    with answering(live, lambda prompt: "x is 42." if "x = 41 + 1" in prompt else CALL) as replies:
        said = run([program("REST_LOCAL_OPENAI_AGENTS"), str(tmp_path / "run.py"), live.url], tmp_path, {})
    assert said.strip() == "x is 42.|x is 42.|x is 42."
    assert len(replies.prompts) == 6
    assert replies.prompts[5].count("What is x?") == 1
