"""Reading a batch file: which lines are requests, what the others become, and the order in which they are run."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.batch import jobs
from rest_local.batch.jobs import CHAT, COMPLETION, EMBEDDING, Job, in_order, read_jobs, read_stream
from rest_local.errors import InputInvalid


def read(*lines: Any) -> list[Job]:
    """Read the jobs of lines, which are bytes as they are or objects that become JSON."""
    data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    return read_stream(io.BytesIO(data), "test")


def line_of(name: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_lines_of_openai() -> None:
    found = read(
        line_of("a", CHAT, messages=[], max_tokens=3), line_of("b", prompt="x"), line_of("c", EMBEDDING, input="y")
    )
    assert [(job.number, job.custom_id, job.url, job.error) for job in found] == [
        (1, "a", CHAT, None),
        (2, "b", COMPLETION, None),
        (3, "c", EMBEDDING, None),
    ]
    assert json.loads(found[0].body) == {"messages": [], "max_tokens": 3}


def test_plain_lines_are_completions_and_chats() -> None:
    found = read({"prompt": "x", "max_tokens": 2}, {"messages": [], "custom_id": "mine"})
    assert [(job.custom_id, job.url) for job in found] == [("line-1", COMPLETION), ("mine", CHAT)]
    assert json.loads(found[1].body) == {"messages": []}


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (b"not json\n", "invalid_json_line", "not valid JSON"),
        (b"[1]\n", "invalid_json_line", "not a JSON object"),
        (b'{"prompt": NaN}\n', "invalid_json_line", "not valid JSON"),
        (b"\xff\xfe\n", "invalid_json_line", "not valid JSON"),
        ({}, "missing_field", "give custom_id"),
        ({"custom_id": "a", "url": COMPLETION}, "missing_field", "body"),
        ({"custom_id": "a", "url": COMPLETION, "body": []}, "missing_field", "body"),
        ({"custom_id": "a", "body": {}}, "invalid_url", "/v1/embeddings"),
        ({"custom_id": "a", "url": "/v1/images", "body": {}}, "invalid_url", "/v1/embeddings"),
        ({"custom_id": "a", "url": COMPLETION, "method": "GET", "body": {}}, None, "POST"),
        ({"custom_id": 7, "prompt": "x"}, None, "custom_id"),
        ({"custom_id": "", "prompt": "x"}, None, "custom_id"),
    ],
)
def test_a_line_that_is_no_request_is_a_job_with_an_error(line: Any, code: str | None, says: str) -> None:
    before, job, after = read({"prompt": "x"}, line, {"prompt": "y"})
    own = line.get("custom_id") if isinstance(line, dict) else None
    assert job.custom_id == ("a" if own == "a" else "line-2")
    assert job.body == b""
    assert job.error is not None
    assert says in job.error["message"]
    assert job.error["code"] == code
    assert job.error["line"] == 2
    assert before.error is None
    assert after.error is None


def test_a_line_with_an_error_keeps_its_own_name() -> None:
    found = read({"custom_id": "a", "url": "/v1/responses", "body": {}}, {"custom_id": "a", "prompt": "x"})
    assert [(job.custom_id, job.error is not None) for job in found] == [("a", True), ("line-2", True)]


def test_a_name_that_is_used_twice_is_an_error_under_another_name() -> None:
    found = read(line_of("a", prompt="x"), line_of("a", prompt="y"), line_of("line-2", prompt="z"))
    assert [job.custom_id for job in found] == ["a", "line-2", "line-3"]
    assert found[0].error is None
    assert [job.error["code"] for job in found[1:] if job.error] == ["duplicate_custom_id"] * 2
    assert "that of line 1" in found[1].error["message"] if found[1].error else False


def test_the_id_tells_the_request() -> None:
    body = {"prompt": "x", "max_tokens": 1}
    same = [read(line_of("a", **body))[0].id, read(line_of("a", **dict(reversed(body.items()))))[0].id]
    assert same[0] == same[1] == read({"custom_id": "a", **body})[0].id
    others = [line_of("b", **body), line_of("a", CHAT, **body), line_of("a", prompt="x", max_tokens=2)]
    assert len({same[0], *(read(other)[0].id for other in others)}) == 4


def test_a_line_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_BYTES", 64)
    found = read({"prompt": "x" * 200}, {"prompt": "y"}, {"prompt": "z" * 64})
    assert [job.number for job in found] == [1, 2, 3]
    assert [job.error is None for job in found] == [False, True, False]


def test_a_compressed_file_says_how_to_unpack_it(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
    with pytest.raises(InputInvalid, match=r"is compressed; unpack it: `gunzip -c FILE \| rest-local batch -`"):
        read_jobs(path)


@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=12))
def test_prompts_that_begin_alike_are_neighbours(prompts: list[str]) -> None:
    """The prompts with any common beginning form one run without a gap."""
    found = in_order(read(*({"max_tokens": len(p), "seed": 1, "prompt": p} for p in prompts)))
    ordered = [json.loads(job.body)["prompt"] for job in found]
    assert sorted(ordered) == sorted(prompts)
    for beginning in {p[:n] for p in prompts for n in range(1, len(p) + 1)}:
        at = [place for place, p in enumerate(ordered) if p.startswith(beginning)]
        assert at == list(range(at[0], at[0] + len(at)))
