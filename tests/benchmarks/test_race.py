"""Players write recorded answers in any program; the race compares times and texts, and says what does not count."""

import json
import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy import demo_model

from benchmarks import lookup_server, player, race, race_report
from benchmarks.program import Binary, Server
from benchmarks.race_texts import WORKLOADS, Task, Texts, named
from rest_local.decoding.engine import Engine
from rest_local.llama.model import Model
from tests.support.repository import Repository

FAKE_SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
kind, answer = sys.argv[1], json.loads(sys.argv[2])
class Handler(BaseHTTPRequestHandler):
    def send(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self): self.send({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if kind == "dies" and body["n_predict"] > 1: sys.exit("CUDA error")
        if kind == "hangs" and body["n_predict"] > 1: time.sleep(60)
        self.send({"tokens": [9] if kind == "wrong" else answer[:body["n_predict"]]})
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return player.write(demo_model(), tmp_path_factory.mktemp("player") / "player.gguf", width=768, layers=1)


def test_a_player_writes_the_answers_that_were_put_into_it_last(model: Path) -> None:
    random = np.random.default_rng(1)
    changed = model.stat().st_mtime_ns
    for _ in range(2):
        first, second = (random.integers(300, 4000, n).tolist() for n in (60, 50))
        prompt, longer = list(range(300, 340)), list(range(300, 420))
        player.play(model, (prompt, first), (longer, second))
        with Engine.load(model, n_ctx=512) as engine:
            assert engine.generate(prompt, max_tokens=60).wait().tokens == first
            assert engine.generate(list(range(400, 440)), max_tokens=70).wait().tokens == first  # whatever is asked
            assert engine.generate(longer, max_tokens=60).wait().tokens == second
    assert model.stat().st_mtime_ns == changed


def test_prompt_lookup_answers_from_a_prompt_longer_than_its_batch(model: Path) -> None:
    prompt, answer = [300, 301, 302] * 190, [303, 304, *[300, 301, 302] * 10]
    player.play(model, (prompt, answer))
    command = [sys.executable, "-m", "benchmarks", "lookup_server", "-m", str(model), "-c", "768", "-t", "1"]
    with Server(command) as server:
        server.start(60)
        for count in (1, len(answer)):
            body = {"prompt": prompt, "n_predict": count}
            assert server.post("/completion", body, 60)[0]["tokens"] == answer[:count]


@pytest.mark.parametrize(
    ("text", "kinds", "longer"),
    [
        (
            NEW_HELP,
            {"ngram-simple", "ngram-mod", "ngram-cache"},
            {"ngram-simple": ["--spec-ngram-simple-size-m", "64"]},
        ),
        (OLD_HELP, {"ngram-simple"}, {"ngram-simple": ["--draft-min", "48", "--draft-max", "64"]}),
    ],
)
def test_options_are_those_of_the_versions_help(
    text: str, kinds: set[str], longer: dict[str, list[str]], tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho 'version: 1 (abc)'\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    binary = Binary.of(program)
    sides = {side.name: list(side.command) for side in race.sides(binary, tmp_path / "m", 512, 2, ["-ngl", "9"])}
    without = {name: sides.pop(f"{name} -fa off") for name in list(sides) if f"{name} -fa off" in sides}
    assert without == {
        name: [*command, "-fa", "off"] for name, command in sides.items() if name.startswith(("llama-server", "ngram"))
    }
    plus = {name for name in sides if name.endswith("+")}
    assert {name for name in sides if name.startswith("ngram")} - plus == kinds
    assert plus == {f"{kind}+" for kind in longer}
    assert all(sides[f"{kind}+"][-len(words) :] == words for kind, words in longer.items())
    assert all("-ngl" in command for name, command in sides.items() if not name.startswith("prompt"))
    assert all(command[command.index("-t") + 1] == "2" for command in sides.values())


def test_a_race_leaves_out_sides_that_fail_and_goes_on_where_it_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "ANSWER_SECONDS", 1.0)
    tasks = [Task("edits", name, [300] * 8, [301, 302, 303]) for name in ("a", "b")]
    kinds = (race.PLAIN, "right", "wrong", "dies", "hangs")
    racers = [race.Side(kind, [sys.executable, "-c", FAKE_SERVER, kind, "[301, 302, 303]"]) for kind in kinds]
    about = {task.id: {"workload": task.workload} for task in tasks}
    found: dict[str, Any] = {"tasks": about, "runs": [], "failed": {}, "rounds": 1}
    told: list[str] = []
    saved: list[int] = []

    def go(limit: float = 100.0) -> None:
        stores = {"edits": tmp_path}
        race.race(found, model, tasks, racers, stores, limit, told.append, lambda: saved.append(len(found["runs"])))

    go()
    assert {run["side"] for run in found["runs"]} == {race.PLAIN, "right"}
    assert {run["task"] for run in found["runs"]} == {"edits: a"}
    assert set(found["failed"]) == {"wrong", "dies", "hangs"}
    assert "from token 0 of a" in found["failed"]["wrong"]
    assert "CUDA error" in found["failed"]["dies"]
    assert "TimeoutError" in found["failed"]["hangs"]
    found["rounds"] = 2
    go(limit=-1.0)
    assert len(found["runs"]) == 2
    assert "the same command goes on" in told[-1]
    go()
    go()
    assert len(found["runs"]) == 4
    assert saved[-1] == 4


def results(**loads: float) -> dict[str, Any]:
    """Two workloads of two answers and two rounds; a peer of 2 and 4 times plain decoding, and this project at 3."""
    tasks = {f"{kind}: {n}": {"workload": kind} for kind in ("edits", "chat") for n in (1, 2)}
    runs = []
    for number, name in enumerate(tasks):
        for turn in (0, 1):
            took = {race.PLAIN: 12.0, race.OFF: 12.0, race.COLD: 4.0, race.STORED: 3.0, "peer": 6.0 - 3 * (number % 2)}
            runs += [{"task": name, "round": turn, "side": side, "seconds": s} for side, s in took.items()]
    runs[-1] = {**runs[-1], "seconds": 100.0, "others": 0.5}
    return {
        "tasks": tasks, "runs": [{**run, **loads} for run in runs], "failed": {"ngram-x": "ends with 1\nmore"},
        "machine": "2 x <CPU>", "threads": 2, "player": "0.5B Q4_0", "llama_server": "1", "revisions": ["abc"],
    }  # fmt: skip


def test_gains_are_geometric_means_with_intervals_and_without_busy_runs() -> None:
    found = results()
    gains = race_report.gains(found)
    peer = gains["edits"]["peer"]
    assert peer.mean == pytest.approx(math.sqrt(8))
    assert (peer.low, peer.high, peer.worst) == (pytest.approx(2), pytest.approx(4), pytest.approx(2))
    assert gains["chat"]["peer"].runs == 3
    every = gains[race_report.ALL]["rest-local"]
    assert (every.mean, every.low, every.high) == (pytest.approx(3), pytest.approx(3), pytest.approx(3))
    assert race_report.over_best(gains["chat"], race.COLD) == (pytest.approx(3 / math.sqrt(8)), "peer")
    assert "1 of 40 runs do not count, because other programs took" in race_report.busy(found)
    assert "others" in found["runs"][-1]


def test_the_section_and_the_picture_are_made_of_the_results(tmp_path: Path) -> None:
    found = results()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- race -->\nold\n<!-- /race -->\nafter\n")
    race_report.put(page, "race", race_report.section(found))
    text = page.read_text()
    assert text.startswith("before\n<!-- race -->\n![")
    assert "old" not in text
    assert "| **all** | 3.00 (3.00 to 3.00) | **4.00** (4.00 to 4.00) | 2.83 (2.00 to 4.00) |" in text
    assert "`ngram-x` was left out: ends with 1\n" in text
    assert "4.0 times as fast" in race_report.headline(found)
    race_report.put(page, "race", "x")
    assert page.read_text() == "before\n<!-- race -->\nx\n<!-- /race -->\nafter\n"
    drawn = ET.fromstring(race_report.picture(race_report.gains(found), "a < b"))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "edits", "chat", "all", "rest-local", "peer", "1: plain decoding"} <= set(texts)


def test_every_workload_has_answers_of_the_wanted_length(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    lines = [f"v{n} = f({n})\n" for n in range(90)]
    for number in range(4):
        lines[20 + number] = f"w{number} = 1\n"
        repository.commit(f"change {number}", {"a.py": "".join(lines), "b.py": "".join(reversed(lines))})
    with Model.open(demo_model(), vocab_only=True) as model:
        rooms = {"whole-file edits": 300, "edits by agents": 300, "second request": 700, "JSON": 300}
        for workload, room in rooms.items():
            texts = Texts(model.vocabulary, repository.path, None, room, 64)
            for task in texts.tasks(workload, 2):
                assert len(task.prompt) <= room
                assert 32 <= len(task.answer) <= 64
                assert task.workload == workload
                assert (task.before is not None) is (workload == "second request")
                json.dumps(task.__dict__)
        assert texts.history("JSON")
        with pytest.raises(FileNotFoundError, match="give --data FOLDER"):
            texts.tasks("chat", 1)
    assert named(["steps", "JSON"]) == ["steps of an agent", "JSON"]
    assert named([]) == list(WORKLOADS)
    with pytest.raises(ValueError, match="no such workload: x"):
        named(["x"])
    assert lookup_server.answer(_Llama(), [1, 2], 5) == [7, 8]


class _Llama:
    def generate(self, tokens: list[int], **_: Any) -> Any:
        yield from (7, 8, 0, 9)

    def token_eos(self) -> int:
        return 0
