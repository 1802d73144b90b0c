"""Batches in a server of two real models: each line goes to its own, people come first, a crash costs no line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from batch_server import ended, jsonl, records, until

from tests.router.conftest import Routed, choice

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]


def client_of(live: Routed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat_lines(count: int, **body: Any) -> list[dict[str, Any]]:
    """Conversations."""
    return [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 8, "temperature": 0}
            | body,
        }
        for number in range(count)
    ]


def made(client: openai.OpenAI, some: list[dict[str, Any]]) -> Any:
    until(lambda: client.batches.with_raw_response.list().status_code == 200)
    file = client.files.create(file=("input.jsonl", jsonl(some)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=some[0]["url"], completion_window="24h")


def test_lines_go_to_their_models(routed: Start, files: Files, tmp_path: Path) -> None:
    live = routed([choice(path) for path in files("one", "two")], kept=tmp_path / "kept")
    client = client_of(live)
    some = chat_lines(9, stream=True)
    for number, line in enumerate(some):
        line["body"]["model"] = ("one", "two", "three")[number % 3]
    batch = ended(client, made(client, some).id)
    assert batch.status == "completed"
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert {each["custom_id"]: each["response"]["body"]["model"] for each in good} == {
        f"c{number}": ("one", "two")[number % 3] for number in range(9) if number % 3 < 2
    }
    assert {each["response"]["body"]["error"]["code"] for each in bad} == {"model_not_found"}
    plain = client.chat.completions.create(**(chat_lines(1)[0]["body"] | {"model": "one"}))
    (same,) = [each for each in good if each["custom_id"] == "c0"]
    assert same["response"]["body"]["choices"][0]["message"]["content"] == plain.choices[0].message.content


def test_a_model_that_is_killed_costs_no_line(routed: Start, files: Files, tmp_path: Path) -> None:
    live = routed([choice(path) for path in files("one")], kept=tmp_path / "kept")
    client = client_of(live)
    begun = made(client, chat_lines(12, max_tokens=60, ignore_eos=True))
    for done in (1, 5):
        until(lambda done=done: client.batches.retrieve(begun.id).request_counts.completed >= done)
        live.process("one").kill()
    batch = ended(client, begun.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 12)


def test_a_stop_leaves_a_batch_that_goes_on(routed: Start, files: Files, tmp_path: Path) -> None:
    paths = files("one")
    live = routed([choice(paths[0])], kept=tmp_path / "kept")
    client = client_of(live)
    begun = made(client, chat_lines(12, max_tokens=60, ignore_eos=True))
    until(lambda: client.batches.retrieve(begun.id).request_counts.completed >= 2)
    live.stop()
    live = routed([choice(paths[0])], kept=tmp_path / "kept")
    client = client_of(live)
    until(lambda: client.batches.with_raw_response.list().status_code == 200)
    batch = ended(client, begun.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 12)
    assert len({each["custom_id"] for each in records(client, batch.output_file_id)}) == 12


def test_cancelling_ends_answers_that_run(routed: Start, files: Files, tmp_path: Path) -> None:
    live = routed([choice(path) for path in files("one")], kept=tmp_path / "kept")
    client = client_of(live)
    begun = made(client, chat_lines(3, max_tokens=2000, ignore_eos=True, rest_local={"context_shift": True}))
    until(lambda: any(slot["is_processing"] for slot in live.get("/slots").json()))
    begun_at = time.monotonic()
    client.batches.cancel(begun.id)
    assert ended(client, begun.id).status == "cancelled"
    until(lambda: not any(slot["is_processing"] for slot in live.get("/slots").json()))
    print(f"cancelled after {time.monotonic() - begun_at:.2f} s")


def test_the_documented_program(routed: Start, files: Files, tmp_path: Path) -> None:
    live = routed([choice(path) for path in files("one")], kept=tmp_path / "kept")
    until(lambda: live.get("/v1/batches").status_code == 200)
    page = (Path(__file__).parents[2] / "docs" / "SERVER.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(import json, time\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = program.replace("http://127.0.0.1:8012", live.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert {each["custom_id"] for each in said} == {"q1", "q2", "q3"}
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in said)
