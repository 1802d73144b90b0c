"""The output of a batch: what stays after a kill at any byte, what is refused, and what a full disk leaves."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rest_local.batch.jobs import Job, read_stream
from rest_local.batch.output import STDOUT, Output
from rest_local.errors import OutputInvalid, OutputUnwritable


def jobs_of(n: int, text: str = "x") -> list[Job]:
    return read_stream(io.BytesIO(b"".join(b'{"prompt": "%s%d"}\n' % (text.encode(), i) for i in range(n))), "test")


def record_of(job: Job, model: str = "m", status: int = 200) -> dict[str, Any]:
    body = {"model": model, "text": job.custom_id * 20} if status == 200 else {"error": {}}
    return {"id": job.id, "custom_id": job.custom_id, "response": {"status_code": status, "body": body}, "error": None}


def write(path: Path, jobs: list[Job], records: list[dict[str, Any]], **options: Any) -> None:
    with Output(path, jobs, "m", **options) as out:
        out.start()
        for record in records:
            out.write(record)


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def test_lines_are_written_and_found_again(tmp_path: Path) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(4)
    write(path, jobs, [record_of(jobs[2]), record_of(jobs[0], status=400)])
    with Output(path, jobs, "m") as out:
        assert (out.done.names, out.done.failed) == ({"line-3", "line-1"}, 1)
        out.start()
        out.write(record_of(jobs[1]))
    assert [line["custom_id"] for line in lines_of(path)] == ["line-3", "line-1", "line-2"]


def test_a_file_cut_at_any_byte_goes_on_with_its_whole_lines(tmp_path: Path) -> None:
    """After the missing lines are written, it has each line once."""
    path, jobs = tmp_path / "out.jsonl", jobs_of(3)
    write(path, jobs, [record_of(job) for job in jobs])
    whole = path.read_bytes()
    kept = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Output(path, jobs, "m") as out:
            done = set(out.done.names)
            out.start()
            for job in jobs:
                if job.custom_id not in done:
                    out.write(record_of(job))
        kept.append(len(done))
        assert sorted(line["custom_id"] for line in lines_of(path)) == ["line-1", "line-2", "line-3"]
    assert kept == sorted(kept)
    assert set(kept) == {0, 1, 2, 3}


def test_zeros_after_a_power_cut_are_a_torn_end(tmp_path: Path) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(2)
    write(path, jobs, [record_of(jobs[0])])
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4096))
    with Output(path, jobs, "m") as out:
        assert out.done.names == {"line-1"}
        out.start()
    assert path.read_bytes() == whole


def test_nothing_is_changed_before_the_start(tmp_path: Path) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(2)
    path.write_bytes(b'{"torn')
    Output(path, jobs, "m", replace=True).close()
    assert path.read_bytes() == b'{"torn'
    write(path, jobs, [record_of(jobs[0])], replace=True)
    assert len(lines_of(path)) == 1


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"id": "other", "custom_id": "line-1"}, "belongs to another input"),
        ({"custom_id": "line-1"}, "belongs to another input"),
        ([1], "belongs to another input"),
        (record_of(jobs_of(1, "y")[0]), "belongs to another input: it answers 'line-1'"),
        (record_of(jobs_of(3)[2]), "belongs to another input: it answers 'line-3'"),
        (record_of(jobs_of(1)[0], model="other"), "answers of another model, 'other'"),
    ],
)
def test_an_output_of_something_else_is_refused_and_stays(tmp_path: Path, record: Any, says: str) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(2)
    data = json.dumps(record).encode() + b"\n"
    path.write_bytes(data)
    with pytest.raises(OutputInvalid, match=f"{says}.*`replace`"):
        Output(path, jobs, "m")
    assert path.read_bytes() == data
    Output(path, jobs, "m", replace=True).close()  # the lock was released


@pytest.mark.parametrize("data", [b"plain text\n", b"\x1f\x8bplain text", b"{}\n" * 2 + b"\xff\n"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(data + b"more of it\n")
    with pytest.raises(OutputInvalid):
        Output(path, jobs_of(2), "m")


def test_an_answer_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(1)
    path.write_bytes(2 * (json.dumps(record_of(jobs[0])).encode() + b"\n"))
    with pytest.raises(OutputInvalid, match="answers 'line-1' twice"):
        Output(path, jobs, "m")


def test_an_output_that_cannot_be_made_has_no_answers_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(OutputUnwritable, match=r"No such file or directory; give another output"):
        Output(tmp_path / "no" / "out.jsonl", jobs_of(1), "m")


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(1)
    with Output(path, jobs, "m"), pytest.raises(OutputInvalid, match="another process"):
        Output(path, jobs, "m")
    Output(path, jobs, "m").close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, jobs = tmp_path / "out.jsonl", jobs_of(3)
    real, room = os.write, [1]

    def short(descriptor: int, data: Any) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: room.pop()])

    with Output(path, jobs, "m") as out:
        out.start()
        out.write(record_of(jobs[0]))
        monkeypatch.setattr(os, "write", short)
        with pytest.raises(OutputUnwritable, match=r"No space left.*same command goes on"):
            out.write(record_of(jobs[1]))
        monkeypatch.undo()
    assert [line["custom_id"] for line in lines_of(path)] == ["line-1"]


def test_the_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    jobs = jobs_of(1)
    write(STDOUT, jobs, [record_of(jobs[0])])
    assert json.loads(capfdbinary.readouterr().out)["custom_id"] == "line-1"
