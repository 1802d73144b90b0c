"""The race asks the same requests of all programs, pauses those that wait, and compares them prompt by prompt."""

import contextlib
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import race, race_report
from benchmarks.program import Binary, Server
from benchmarks.race_prompts import WORKLOADS, Prompt, prompts

FAKE_SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
kind = sys.argv[1]
child = subprocess.Popen(["sleep", "1000"], start_new_session=True) if kind == "parent" else None
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"child": child and child.pid}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if kind == "dies" and asked["prompt"] == "second": os._exit(3)
        if kind == "refuses": self.send_error(400, "no such thing"); return
        self.send_response(200); self.end_headers()
        pieces = {"silent": []}.get(kind, ["", "a", os.environ["HOME"] if kind == "home" else kind[:1], "b"])
        for text in pieces:
            self.wfile.write(f"data: {json.dumps({'choices': [{'text': text}]})}\\n\\n".encode())
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\\n\\ndata: [DONE]\\n\\n".encode())
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
try: server.serve_forever()
finally: child and child.kill()
"""
NEW_HELP = """
-m,    --model FNAME                    model path to load
-c,    --ctx-size N                     size (default: 4096)
--port PORT                             port (default: 8080)
--spec-type none,draft-simple,ngram-simple,ngram-mod,ngram-cache
                                        comma-separated list of types (default:
                                        none)
--spec-ngram-mod-n-min N                minimum (default: 48)
--spec-ngram-mod-n-max N                maximum (default: 64)
--spec-ngram-simple-size-m N            ngram size M for ngram-simple speculative decoding, length of draft
                                        m-gram (default: 48)
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
"""
OLD_HELP = """
-m,    --model FNAME       model path to load
-c,    --ctx-size N        size (default: 4096)
--port PORT                port (default: 8080)
--draft-max, --draft-n N   number of tokens to draft (default: 16)
--draft-min N              minimum (default: 0)
--spec-type [none|ngram-simple]   type of speculative decoding
"""


def fake(kind: str) -> list[str]:
    return [sys.executable, "-c", FAKE_SERVER, kind]


def empty() -> dict[str, Any]:
    return {"runs": [], "answers": {}, "failed": {}, "loads": {}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with three recorded questions and answers."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows: dict[str, dict[str, Any]] = {
        "mt_bench_questions.jsonl": {"turns": ["Why?", "And then?"]},
        "mt_bench_answers_vicuna-7b-v1.5.jsonl": {"choices": [{"turns": ["Because.</s>"]}]},
    }
    for name, row in rows.items():
        lines = [json.dumps({"question_id": number, **row}) for number in (81, 82, 83)]
        (folder / name).write_text("\n".join(lines))
    turns = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "ls"}] * 4
    with gzip.open(folder / "agents_mini_swe_gemini3.jsonl.gz", "wt") as steps:
        for n in (1, 3, 5):
            answer = {"body": {"choices": [{"message": turns[n]}]}}
            print(
                json.dumps({"custom_id": f"run-{n}", "body": {"messages": turns[:n]}, "response": answer}), file=steps
            )
    return folder


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_always_makes_the_same_greedy_prompts(workload: str, data: Path) -> None:
    found = prompts(workload, 3, 50, data)
    assert len({prompt.name for prompt in found}) == 3
    assert prompts(workload, 3, 50, data) == found
    for prompt in found:
        assert (prompt.body["temperature"], prompt.body["max_tokens"]) == (0, 50)
        json.dumps(prompt.body)


def test_the_turns_of_an_agent_go_on_from_each_other(data: Path) -> None:
    turns = [prompt.body["messages"] for prompt in prompts("agents", 3, 50, data)]
    assert [len(messages) for messages in turns] == [1, 3, 5]
    assert turns[2][:3] == turns[1]


def test_the_expected_text_continues_the_prompt(data: Path) -> None:
    for workload in ("copy", "edit"):
        for prompt in prompts(workload, 3, 50, None):
            first, second, third = (prompt.body["prompt"] + prompt.expected).strip().split("\n\ndef ")[-3:]
            assert second.strip() == third.strip()
            assert (first.strip().removeprefix("def ") == second.strip()) is (workload == "copy")
    (turn, *_) = prompts("second turn", 1, 50, data)
    assert turn.before is not None
    assert turn.before["messages"] == turn.body["messages"][:1]
    assert turn.body["messages"][1] == {"role": "assistant", "content": turn.expected}


def test_recorded_questions_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"mt_bench_questions\.jsonl is not there; give --data FOLDER"):
        prompts("chat", 1, 50, tmp_path)


@pytest.mark.parametrize(
    ("text", "kinds"), [(NEW_HELP, ["ngram-simple", "ngram-mod", "ngram-cache"]), (OLD_HELP, ["ngram-simple"])]
)
def test_the_sides_are_those_of_the_versions_help(text: str, kinds: list[str], tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho 'version: 1 (abc)'\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    sides = race.commands(tmp_path / "m.gguf", Binary.of(program), tmp_path / "store", ["-c", "512"])
    assert [side for side in sides if not side.startswith("rest-local")] == [
        "llama-server",
        "llama-server -fa off",
        *kinds,
    ]
    assert all(sides[kind][-2:] == ["--spec-type", kind] for kind in kinds)
    assert sides["rest-local -d"][-2:] == ["-d", str(tmp_path / "store")]
    assert sides["rest-local --exact --policy off"][-3:] == ["--exact", "--policy", "off"]
    assert all(command[command.index("-c") + 1] == "512" for command in sides.values() if "-c" in command)
    with pytest.raises(ValueError, match="no such side: x; there are llama-server, "):
        race._chosen("rest-local, x", list(sides), "side")


def test_a_paused_server_and_its_child_in_another_session_stop_and_go_on() -> None:
    def states(pids: list[int]) -> set[str]:
        listed = subprocess.run(["ps", "-o", "state=", "-p", ",".join(map(str, pids))], capture_output=True, text=True)
        return {line[0] for line in listed.stdout.split()}

    def waits_for(condition: Callable[[], bool]) -> None:
        while not condition():  # the system stops a process when it next looks at its signals
            pass

    with Server(fake("parent")) as server:
        server.start(60)
        _, said = server._request("GET", "/health", None, 60)
        pids = [server._process.pid, json.loads(said)["child"]]
        server.pause()
        waits_for(lambda: states(pids) == {"T"})
        server.resume()
        waits_for(lambda: "T" not in states(pids))
        assert server._request("GET", "/health", None, 60)[0] == 200
        server.pause()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[1], 9)
    assert server._process.returncode is not None


def test_sides_answer_all_prompts_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    found = empty()
    asked = [Prompt(name, "/v1/completions", {"prompt": name}, expected="ar") for name in ("first", "second")]
    sides = {kind: fake(kind) for kind in ("right", "dies", "refuses", "silent", "home")}
    race.race(found, "copy", asked, sides, tmp_path)
    ran = [(run["prompt"], run["side"]) for run in found["runs"]]
    assert sorted(ran) == [
        ("first", "dies"), ("first", "home"), ("first", "right"), ("second", "home"), ("second", "right")
    ]  # fmt: skip
    assert "gives no answer" in found["failed"]["copy: dies"]
    assert "answers 400" in found["failed"]["copy: refuses"]
    assert "answers nothing to" in found["failed"]["copy: silent"]
    runs = {run["side"]: run for run in found["runs"]}
    assert found["answers"][runs["right"]["answer"]] == "arb"
    assert found["answers"][runs["home"]["answer"]] == f"a{tmp_path / 'copy 4'}b"
    assert runs["right"]["repeats"] == 0.8
    assert (runs["right"]["prompt_tokens"], runs["right"]["tokens"]) == (2, 3)
    assert 0 < runs["right"]["first"] <= runs["right"]["seconds"]


def test_servers_of_a_race_write_only_into_homes_of_their_own(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    every = race.commands(tiny_model("llama"), None, tmp_path / "store", ["-c", "2048"])
    sides = {name: every[name] for name in ("rest-local", "rest-local --policy off")}
    homes = tmp_path / "homes"
    homes.mkdir()
    found = empty()
    race.race(found, "stored code", prompts("stored code", 1, 8, None), sides, homes)
    assert not found["failed"]
    assert sorted(tmp_path.iterdir()) == [homes]
    result = race_report.summaries(found)["stored code"]
    assert {side: each.same for side, each in result.items()} == dict.fromkeys(sides, 1)


def results() -> dict[str, Any]:
    """Return two workloads of two prompts. In `copy` the peer is 2 and 4 times as fast, and rest-local 3 times."""
    runs = []
    for workload, ours in (("copy", 4.0), ("chat", 12.0)):
        for number, name in enumerate(("a", "b")):
            took = {
                "llama-server": 12.0,
                "ngram-mod": 6.0 - 3 * number,
                "rest-local": ours,
                "rest-local --policy off": 12.0,
            }
            took |= {"rest-local --exact": 12.0, "rest-local --exact --policy off": 12.0}
            for side, seconds in took.items():
                answer = {"rest-local": f"{name}{number}", "rest-local --exact": f"e{name}"}.get(side, f"{name}0")
                answer = f"e{name}" if side.startswith("rest-local --exact") else answer
                run = race.Run(workload, name, side, 9, 24, 1.0 + number, seconds, answer, 0.5)
                runs.append(run.__dict__)
    return {
        "model": "M", "llama_server": "1", "machine": "2 x <CPU>", "revision": "abc", "real_time": True,
        "neighbour": False, "arguments": [], "loads": {"copy": {"others": 0.25}}, "runs": runs, "answers": {},
        "failed": {"chat: ngram-x": "ends with 1\nmore"},
    }  # fmt: skip


def test_ratios_are_paired_by_prompt_and_answers_compared_within_a_program() -> None:
    copy = race_report.summaries(results())["copy"]
    peer, ours = copy["ngram-mod"], copy["rest-local"]
    assert peer.gain is not None
    assert [peer.gain.mean, peer.gain.worst] == pytest.approx([math.sqrt(8), 2])
    assert ours.gain is not None
    assert [ours.gain.low, ours.gain.mean, ours.gain.high] == pytest.approx([3, 3, 3])
    assert [ours.request, ours.decoding, ours.first] == pytest.approx([6, 46 / 5, 1.5])
    assert {side: each.same for side, each in copy.items()} == {
        "llama-server": 2, "ngram-mod": 2, "rest-local": 1, "rest-local --policy off": 2,
        "rest-local --exact": 2, "rest-local --exact --policy off": 2,
    }  # fmt: skip
    best = race_report.best_peer(copy)
    assert best is not None
    assert best[0] == "ngram-mod"
    text = "\n".join(race_report.lines(results()))
    assert "copy: others took 25.0% of the processors" in text
    assert "chat: ngram-x was left out: ends with 1" in text


def test_a_short_answer_does_not_count_as_a_slow_one() -> None:
    found = results()
    for run in found["runs"]:
        if (run["workload"], run["side"]) == ("copy", "rest-local"):
            run |= {"first": 1.0, "seconds": 2.0, "tokens": 17}
        elif (run["workload"], run["side"]) == ("copy", "llama-server"):
            run |= {"first": 1.0, "seconds": 9.0, "tokens": 129}
    ours = race_report.summaries(found)["copy"]["rest-local"]
    assert ours.gain is not None
    assert ours.decoding_gain is not None
    assert [ours.gain.mean, ours.decoding_gain.mean] == pytest.approx([1, 1])


def test_tables_and_headline_are_made_of_the_results(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- race -->\nold\n<!-- /race -->\nafter\n")
    race_report.put(page, "race", race_report.section([results()]))
    text = page.read_text()
    assert text.startswith("before\n<!-- race -->\nM on 2 x <CPU>, ahead of other programs (chrt); llama-server 1;")
    assert "| copy | **3.00** (3.00) |" in text
    assert "| copy | 2 | 2.0 | 1500 ms | 6.0 | 1500 ms | 1 of 2 |" in text
    assert "`chat: ngram-x` was left out: ends with 1." in text
    assert "old" not in text
    headline = race_report.headline([results()])
    assert "| copy | 3.00 | 2.83 (`ngram-mod`) |" in headline
    assert "| copy, N | 3.00 | " in race_report.headline([results(), results() | {"model": "N"}])
    assert "\n\n2 of 4 answers were " in headline


def test_races_on_the_same_machine_share_their_tables() -> None:
    both = results()
    parts = [both | {"runs": [run for run in both["runs"] if run["workload"] == name]} for name in ("copy", "chat")]
    assert race_report.section([parts[0], parts[1] | {"failed": {}}]) == race_report.section([both])
    assert race_report.section([both, both | {"machine": "another"}]).count("Whole requests") == 2


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    with pytest.raises(ValueError, match="lacks the marks of other"):
        race_report.put(page, "other", "x")
