"""Jobs through an engine with the demo model: OpenAI's objects, errors as answers, the same bytes in exact mode."""

import base64
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from support.pooled import with_pooling
from support.toy import demo_model

from rest_local.batch.jobs import Job, in_order, read_stream
from rest_local.batch.worker import Worker, seed_of
from rest_local.decoding.engine import Engine

CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def jobs_of(*lines: dict[str, Any]) -> list[Job]:
    return read_stream(io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines)), "test")


def answered(worker: Worker, *lines: dict[str, Any]) -> dict[str, Any]:
    """Return the records by custom_id, of which every job has one."""
    jobs = jobs_of(*lines)
    found = [answer.record for answer in worker.answers(in_order(jobs))]
    assert sorted(record["custom_id"] for record in found) == sorted(job.custom_id for job in jobs)
    return {record["custom_id"]: record for record in found}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Engine.load(demo_model(), slots=4, n_ctx=256, threads=1) as engine, Worker(engine) as worker:
        yield worker


def test_answers_have_the_form_of_openai(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.engine.model, "chat_template", CHATML)
    text = {"custom_id": "text", "prompt": "import os\n", "max_tokens": 5, "ignore_eos": True}
    chat = {"custom_id": "chat", "messages": [{"role": "user", "content": "import"}], "max_tokens": 5}
    found = answered(worker, text, chat | {"ignore_eos": True})
    for record in found.values():
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
        body = record["response"]["body"]
        assert (body["model"], body["usage"]["completion_tokens"]) == ("demo", 5)
        assert body["choices"][0]["finish_reason"] == "length"
        assert "timings" not in body
    assert Completion.model_validate(found["text"]["response"]["body"]).choices[0].text
    assert ChatCompletion.model_validate(found["chat"]["response"]["body"]).choices[0].message.content


@pytest.mark.parametrize(
    ("line", "status", "code", "param"),
    [
        ({"prompt": "x " * 600}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": "x", "max_tokens": "7"}, 400, "invalid_type", "max_tokens"),
        ({"prompt": "x", "temperature": -1e308, "top_p": 7.0}, 400, "invalid_value", None),
        ({"prompt": []}, 400, "invalid_value", "prompt"),
        ({"prompt": "x", "grammar": "root ::= ("}, 400, "invalid_value", "grammar"),
        ({"prompt": [10**9]}, 400, "invalid_value", None),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, 501, "no_embeddings", None),
        ({"url": "/v1/chat/completions", "body": {}}, 400, "invalid_type", "messages"),
    ],
)
def test_what_is_wrong_with_a_request_is_its_answer(
    worker: Worker, line: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    good = {"custom_id": "good", "prompt": "import", "max_tokens": 2, "ignore_eos": True}
    found = answered(worker, {"custom_id": "bad", **line}, good)
    response = found["bad"]["response"]
    assert response["status_code"] == status
    assert response["body"]["error"]["code"] == code
    assert response["body"]["error"]["param"] == param
    assert found["bad"]["error"] is None
    assert found["good"]["response"]["status_code"] == 200


def test_a_fault_of_this_program_ends_one_job(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.engine.request

    def broken(prompt: Sequence[int], **options: Any) -> Any:
        if options["max_tokens"] == 7:
            raise ZeroDivisionError("a fault")
        return real(prompt, **options)

    monkeypatch.setattr(worker.engine, "request", broken)
    lines = [{"custom_id": str(n), "prompt": "import", "max_tokens": n, "ignore_eos": True} for n in (6, 7, 8)]
    found = answered(worker, *lines)
    assert {name: record["response"]["status_code"] for name, record in found.items()} == {"6": 200, "7": 500, "8": 200}


def test_a_limit_for_requests_that_name_none(worker: Worker) -> None:
    limited = Worker(worker.engine, max_tokens=3)
    lines: list[dict[str, Any]] = [
        {"custom_id": "none", "prompt": "import", "ignore_eos": True},
        {"custom_id": "own", "prompt": "import", "ignore_eos": True, "max_tokens": 5},
        {"custom_id": "native", "prompt": "import", "ignore_eos": True, "n_predict": 4},
    ]
    found = answered(limited, *lines)
    counts = {name: record["response"]["body"]["usage"]["completion_tokens"] for name, record in found.items()}
    assert counts == {"none": 3, "own": 5, "native": 4}


def test_embeddings(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = with_pooling(tiny_model("llama", n_ctx=256), tmp_path / "tiny.gguf", 3)
    with Engine.load(path, n_ctx=64, threads=1) as engine, Worker(engine) as worker:
        lines = [
            {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": ["x", "y"]}},
            {"custom_id": "b", "url": "/v1/embeddings", "body": {"input": "x", "encoding_format": "base64"}},
            {"custom_id": "c", "prompt": "x", "max_tokens": 2},
        ]
        found = answered(worker, *lines)
    both = CreateEmbeddingResponse.model_validate(found["a"]["response"]["body"])
    packed = np.frombuffer(base64.b64decode(found["b"]["response"]["body"]["data"][0]["embedding"]), "<f4")
    assert np.array_equal(np.array(both.data[0].embedding, np.float32), packed)
    assert found["c"]["response"]["status_code"] == 200


LINES = [
    {
        "custom_id": f"r{n}",
        "prompt": f"import os\nimport sys\n{'def' if n % 2 else 'class'} a{n}",
        "max_tokens": 12,
        **more,
    }
    for n, more in enumerate(
        [{}, {"temperature": 0}, {"n": 2}, {"seed": 3}, {"logprobs": 2}, {"prediction": {"content": "x"}}]
    )
]


def test_in_exact_mode_only_the_job_decides_what_its_line_says() -> None:
    """Neither the order nor earlier answers change a byte, `created` aside."""
    jobs = jobs_of(*LINES)
    runs = []
    for seed in (1, 2):
        with Engine.load(demo_model(), n_ctx=128, threads=1, exact=True) as engine, Worker(engine) as worker:
            order = random.Random(seed).sample(jobs, len(jobs))
            found = [answer.record for answer in worker.answers(order[:2])]
            found += [answer.record for answer in worker.answers(order[2:])]
        for record in found:
            assert record["response"]["body"].pop("created") > 0
        runs.append(sorted(json.dumps(record) for record in found))
    assert runs[0] == runs[1]


def test_draws_without_a_seed_differ_by_name_and_not_by_run(worker: Worker) -> None:
    lines = [{"custom_id": name, "prompt": "import os\n", "max_tokens": 20, "ignore_eos": True} for name in "abcdef"]
    texts = [
        {name: record["response"]["body"]["choices"][0]["text"] for name, record in answered(worker, line).items()}
        for line in (*lines, *lines)
    ]
    assert texts[:6] == texts[6:]
    assert len({*map(str, (list(text.values()) for text in texts))}) > 1
    assert seed_of("a") != seed_of("b")


def test_answers_that_are_left_free_the_slots(worker: Worker) -> None:
    jobs = jobs_of(*({"prompt": "import", "max_tokens": 3 + n} for n in range(8)))
    answers = worker.answers(jobs)
    next(answers)
    answers.close()
    assert not worker.engine.decoder.context.scheduler.busy
