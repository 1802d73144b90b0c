"""The figures of a comparison and the words about them: medians, losses by their size, tables that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rest_local.bench.comparing.energy import Energy
from rest_local.bench.comparing.section import section, words
from rest_local.bench.comparing.summary import summarize
from rest_local.bench.results import Machine, Result

MACHINE = Machine("A processor", 2, 8.0, "Linux x86_64", "3.11.7", 0.25)


def side(speedup: float | None, **given: Any) -> dict[str, Any]:
    row = {
        "tokens": 40, "tokens_per_second": 10.0, "speedup": speedup, "steps": 20, "drafted": 40, "accepted": 20,
        "differs_at": [None], "repeated_8grams": 0.0, "joules_per_token": None,
    }  # fmt: skip
    return {**row, **given}


def record(workload: str, task: str, sides: dict[str, Any], **given: Any) -> dict[str, Any]:
    plain = {
        "tokens": 40, "tokens_per_second": [10.0, 11.0], "repeated_8grams": 0.0, "same": True, "joules_per_token": None,
    }  # fmt: skip
    kind = {name: given.pop(name, default) for name, default in (("mode", "real"), ("settings", "fast"))}
    return {**kind, "workload": workload, "task": task, "plain": {**plain, **given}, "sides": sides}


RECORDS = [
    record("edit", "a", {"auto": side(2.0), "sam": side(3.0, differs_at=[4])}),
    record("edit", "b", {"auto": side(3.0), "sam": side(2.0)}, repeated_8grams=0.9),
    record("edit", "c", {"auto": side(2.4), "sam": side(2.5, accepted=10, steps=30, drafted=20)}),
    record("chat", "d", {"auto": side(1.5), "sam": side(0.9)}),
    record("json", "e", {"auto": side(1.1), "sam": {"left_out": "no schemas"}}),
    record("spec-bench/qa", "f", {"auto": side(1.0), "sam": side(1.01)}),
    record("spec-bench/rag", "g", {"auto": side(1.0), "sam": side(1.0)}),
    record("edit", "a", {"auto": side(1.9), "sam": side(2.1)}, settings="exact"),
    record("replay/edits", "h", {"auto": side(4.0), "arctic": side(3.0)}, mode="replay"),
]


def data(records: list[dict[str, Any]] = RECORDS) -> dict[str, Any]:
    return {
        "model": "a.gguf", "replay_model": "b.gguf", "threads": 2, "left_out": [], "failed": [], "energy": "none here",
        **summarize(records),
    }  # fmt: skip


def row_of(workload: str, mode: str = "real", settings: str = "fast") -> dict[str, Any]:
    rows = summarize(RECORDS)["workloads"]
    [row] = [r for r in rows if (r["workload"], r["mode"], r["settings"]) == (workload, mode, settings)]
    found: dict[str, Any] = row
    return found


def test_a_workload_has_medians_and_sums() -> None:
    row = row_of("edit")
    assert row["prompts"] == 3
    assert row["plain"]["tokens_per_second"] == 10.5
    assert row["plain"]["noise"] == pytest.approx(0.1)
    assert row["plain"]["looping"] == 1
    sam = row["sides"]["sam"]
    assert (sam["speedup"], sam["least"], sam["least_of"]) == (2.5, 2.0, "edit b")
    assert sam["steady"] == 2.75  # without the prompt that loops
    assert sam["mat"] == pytest.approx(1 + 50 / 70, abs=1e-4)
    assert sam["acceptance"] == 0.5
    assert (sam["answers"], sam["differing"]) == (3, 1)


def test_a_side_without_figures_says_why_and_a_replay_counts_no_differences() -> None:
    assert row_of("json")["sides"]["sam"] == {"prompts": 0, "left_out": "no schemas"}
    assert row_of("replay/edits", "replay")["sides"]["auto"]["differing"] is None


def test_spec_bench_counts_once_and_means_are_over_shared_workloads() -> None:
    assert row_of("spec-bench")["prompts"] == 2
    [fast] = [row for row in summarize(RECORDS)["overall"] if (row["mode"], row["settings"]) == ("real", "fast")]
    assert fast["workloads"] == ["edit", "chat", "spec-bench"]  # sam has no figure for json
    assert fast["sides"]["auto"]["mean"] == pytest.approx((2.4 * 1.5 * 1.0) ** (1 / 3), abs=1e-4)
    assert (fast["sides"]["sam"]["least"], fast["sides"]["sam"]["least_of"]) == (0.9, "chat d")


def test_words_say_what_won_and_what_lost_by_how_much() -> None:
    said = " ".join(words(data()))
    assert "`auto` lost to sam on edit by 4%" in said
    assert "`auto` won on 2 workloads: chat (1.50 x plain; next plain, 1.00), json (1.10 x plain" in said
    assert "within 2% on spec-bench" in said
    assert "`auto` won on 1 workload: replay/edits (4.00 x plain; next arctic, 3.00)" in said
    assert "Exact settings: all 2 answers of auto, sam have the tokens of plain decoding" in said
    assert "sam 1." in said
    assert "1 of 7 plain answers loop" in said


def test_an_exact_answer_that_differs_is_not_hidden() -> None:
    changed = record("edit", "a", {"auto": side(1.9, differs_at=[3]), "sam": side(2.1)}, settings="exact")
    said = " ".join(words(data([changed])))
    assert "Exact settings: 1 of 2 answers differ from plain decoding (auto 1)" in said


def test_the_section_fits_its_tables_and_figures_after_a_round_trip(tmp_path: Path) -> None:
    left_out = [{"workload": "edit", "reason": "too long", "prompts": 2}, {"side": "arctic", "reason": "not here"}]
    failed = [{"stage": "fast", "side": "llama-server", "reason": "it crashed"}]
    content = {**data(), "left_out": left_out, "failed": failed}
    path = tmp_path / "compare.json"
    Result("compare", "rest-local bench compare", MACHINE, "1", "2026-11-23T00:00:00Z", 1.0, True, content).save(path)
    shown = section(Result.load(path))
    for table in shown.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
    for figure in shown.figures:
        assert {len(series.y) for series in figure.series} == {len(figure.categories)}, figure.title
    assert [figure.name for figure in shown.figures] == [
        "compare-real", "compare-real-spec-bench", "compare-replay",
    ]  # fmt: skip
    [left] = [table for table in shown.tables if table.title == "Left out"]
    assert [row[2] for row in left.rows] == ["too long", "not here", "it crashed"]
    assert "No energy: none here." in shown.footnotes
    json.dumps(content)


def test_a_side_that_does_nothing_has_no_mat_and_no_speed() -> None:
    empty = record("chat", "a", {"auto": side(None, steps=0, drafted=0, accepted=0)}, tokens_per_second=[0.0, 0.0])
    [row] = summarize([empty])["workloads"]
    assert row["plain"]["tokens_per_second"] is None
    assert row["sides"]["auto"] == {"prompts": 0, "left_out": "no answer of two tokens"}
    assert list(words({**data(), **summarize([empty])}))


def counters(root: Path, *values: int, largest: int = 1000) -> None:
    for number, value in enumerate(values):
        zone = root / f"intel-rapl:{number}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "energy_uj").write_text(str(value))
        (zone / "max_energy_range_uj").write_text(str(largest))
        (root / f"intel-rapl:{number}:0").mkdir(exist_ok=True)  # a part of it, which is not counted twice


def test_energy_is_the_sum_of_the_counters_also_where_one_begins_again(tmp_path: Path) -> None:
    counters(tmp_path, 100, 900)
    energy = Energy(tmp_path)
    assert energy.reason is None
    assert energy.joules() is None
    energy.begin()
    counters(tmp_path, 300, 50)
    assert energy.joules() == pytest.approx(1e-6 * (200 + 150))


def test_energy_has_a_reason_where_there_is_none(tmp_path: Path) -> None:
    energy = Energy(tmp_path / "none")
    assert energy.reason is not None
    assert "no energy counters" in energy.reason
    energy.begin()
    assert energy.joules() is None
    counters(tmp_path, 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("secret")
    assert "cannot be read" in (Energy(tmp_path).reason or "")
