"""A report from results that were written by hand: what is in the page and in the document, and what never is."""

from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.results import MACHINE, curve, folder_of, replay_data, result

from rest_local.bench.report.markdown import document
from rest_local.bench.report.page import page
from rest_local.bench.report.reading import Part, Report
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.report.writing import make, write_markdown, write_page
from rest_local.cli.main import run

BAD = "<script>alert(1)</script>|\"'`&\u202e$x_1^{ --> ]]> javascript:x"


class Outline(HTMLParser):
    """Elements of a page, and the levels of its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    @property
    def headings(self) -> list[int]:
        return [int(tag[1]) for tag, _ in self.elements if re.fullmatch("h[1-6]", tag)]


def report(*sections: Section) -> Report:
    return Report([Part(section, [result()]) for section in sections])


def section(**more: Any) -> Section:
    return Section(title="A measurement", command="rest-local bench x", **more)


def test_a_document_says_where_its_figures_come_from() -> None:
    text, files = document(report(section(words=["Drafts won by `auto`."])), "")
    assert text == (
        "# Benchmarks\n\n"
        "This page is made by `rest-local bench report` from the files of a folder of results. Do not edit it.\n\n"
        "- Measured on Test CPU, 4 cores, 16 GB, Linux x86&#95;64, Python 3.12.1, numpy 2.0.\n".replace("&#95;", "_")
        + f"- Version {result().version} of rest-local.\n"
        "- Dates: 2026-11-22.\n\n"
        "## A measurement\n\n"
        "| command | machine | version | date | took |\n|---|---|---|---|---|\n"
        "| `rest-local bench replay answers.jsonl --out DIR` | Test CPU, 4 cores; load 0.1 | "
        f"{result().version} | 2026-11-22 | 1 min 15 s |\n\n"
        "Drafts won by `auto`.\n"
    )
    assert files == {}


def test_the_best_number_of_a_row_is_bold_and_numbers_stand_right() -> None:
    table = Table(
        "T", ["side", "plain", "auto", "n"], [["a", 1.0, 1.234, 5], ["b|c", 2.0, None, 7]], "note", best=[1, 2]
    )
    text, _ = document(report(section(tables=[table])), "")
    assert "**T**\n\n| side | plain | auto | n |\n|---|---:|---:|---:|\n| a | 1.00 | **1.23** | 5 |\n" in text
    assert "| b&#124;c | 2.00 | \u2013 | 7 |\n\nnote\n" in text
    html = page(report(section(tables=[table])))
    assert '<td class="number"><strong>1.23</strong></td>' in html
    assert '<th scope="row">b|c</th>' in html


def test_a_page_is_whole_and_can_be_read_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    html = page(make(folder_of(tmp_path / "results", a=result(), b=result(replay_data("code")))))
    outline = Outline(html)
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(outline.headings, outline.headings[1:], strict=False))
    assert all(attributes.get("scope") in ("col", "row") for attributes in outline.all("th"))
    pictures = outline.all("svg")
    assert len(pictures) == 6
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert not outline.all("script", "img", "link", "iframe", "object", "image")
    assert not [
        value for _, attributes in outline.elements for name, value in attributes.items() if name.startswith("on")
    ]
    links = [str(value) for _, found in outline.elements for name, value in found.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    assert "url(http" not in html
    assert "@import" not in html
    ids = [str(attributes["id"]) for _, attributes in outline.elements if "id" in attributes]
    assert {link[1:] for link in links} <= {*ids}
    used = {
        *re.findall(r"url\(#([^)]+)\)", html),
        *(str(a[name]) for _, a in outline.elements for name in a if name == "aria-labelledby"),
    }
    assert used <= {*ids}
    assert all(colour not in html for colour in ('#1a1a1b"', "#fefeff"))


def test_a_report_of_replays_names_what_lost(tmp_path: Path) -> None:
    text, files = document(make(folder_of(tmp_path / "r", a=result(), b=result(replay_data("code")))), "results/")
    assert "Slower than plain decoding: chat: math on cpu-2-cores-0.5b-q4_0 (0.990), code: math on cpu-2" in text
    assert "Slower with the time of lookups, as a whole: chat on cpu-2-cores-0.5b-q4_0 (0.980), code on" in text
    assert "The greatest gain is 1.620 times plain decoding" in text
    assert "| chat: math | 3 | 1.62 | 0.990 |" in text
    assert text.count("## ") == 2
    for name in files:
        assert f"](results/{name})" in text


def test_other_machines_versions_busy_and_quick_results_are_said() -> None:
    from dataclasses import replace

    slow = replace(MACHINE, processor="Other", load=3.0)
    parts = [
        Part(section(), [result()]),
        Part(
            Section("B", "x"),
            [result(machine=slow, version="0.0.1", quick=True, started="2026-11-24T00:00:00Z", kind="compare")],
        ),
        Part(Section("C", "x"), [result(machine=slow)]),
    ]
    text, _ = document(Report(parts, [("c.json", "format 2")]), "")
    assert "The results come from 2 machines." in text
    assert "2 versions of rest-local" in text
    assert "Dates: 2026-11-22 to 2026-11-24." in text
    assert "only as a first look: B." in text
    assert "Their counts hold, their times do not: B." in text
    assert "## B (quick)" in text
    assert text.count("(busy)") == 1
    assert "Other, 4 cores; load 3.0 (busy)" in text
    assert "| c.json | format 2 |" in text


def hostile() -> Section:
    figure = Figure(BAD, BAD, BAD, BAD, [Series(BAD, [1.0, 2.0], [1, 2]), Series(BAD, [2.0, 3.0], [1, 2])], BAD)
    bars = Figure(BAD, BAD, BAD, BAD, [Series(BAD, [1.0, None])], BAD, categories=[BAD, "漢字"])
    return Section(BAD, BAD, [BAD], [Table(BAD, [BAD, BAD], [[BAD, BAD], [BAD, 1.0]], BAD)], [figure, bars], BAD, [BAD])


def test_nothing_in_a_result_becomes_markup() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    machine = MACHINE.__class__(BAD, 1, 1.0, BAD, BAD, 0.0, (), BAD, {BAD: BAD})
    made = Report([Part(hostile(), [result(command=BAD, machine=machine, version=BAD, started=BAD)])], [(BAD, BAD)])
    html = page(made)
    outline = Outline(html)
    assert not outline.all("script")
    assert "\u202e" not in html
    text, files = document(made, "")
    assert "<script" not in text
    assert "\u202e" not in text
    for line in text.splitlines():
        if line.startswith("| ") and "alert" in line:
            assert line.count("|") in (3, 6)
    assert sorted(files) == [
        "script-alert-1-script-x-1-javascript-x-2.svg",
        "script-alert-1-script-x-1-javascript-x.svg",
    ]
    for content in files.values():
        found = ElementTree.fromstring(content)
        assert not [element for element in found.iter() if element.tag.endswith("}script")]


def test_figures_that_cannot_be_drawn_are_said_and_lose_nothing() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    empty = Figure("e", "Empty", "x", "y", [Series("a", [None, float("nan")], [1, 2])], "alt")
    wild = Figure("w", "Wild", "x", "y", [Series("a", [1e300, 2.0, float("inf")], [0, 1, 2])], "alt", log_x=True)
    text, files = document(report(section(figures=[empty, wild])), "")
    assert "No figure: figure e has no number." in text
    assert list(files) == ["w.svg"]
    assert "No figure: figure e has no number." in page(report(section(figures=[empty, wild])))


def test_the_same_results_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = folder_of(tmp_path / "r", a=result(), b=result(replay_data("code")))
    first = page(make(folder)), document(make(folder), "")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30.0)  # the user's own style
    assert (page(make(folder)), document(make(folder), "")) == first


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **named)

    folder = folder_of(tmp_path / "r", a=result())
    monkeypatch.setattr(builtins, "__import__", without)
    made = make(folder)
    write_page(made, tmp_path / "r.html")
    assert write_markdown(made, tmp_path / "R.md", folder) == []
    for text in ((tmp_path / "r.html").read_text("utf-8"), (tmp_path / "R.md").read_text("utf-8")):
        assert "pip install &#39;rest-local[report]&#39;" in text or "`pip install 'rest-local[report]'`" in text
        assert "By workload and curve" in text
        assert "<svg" not in text


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "docs results", a=result())
    (folder / "broken.json").write_text('{"rest_local_result": 9}')
    markdown = tmp_path / "B.md"
    assert run(["bench", "report", str(folder), "--markdown", str(markdown)]) == 0
    assert "warning: broken.json is left out: format 9, and this version reads format 1" in capsys.readouterr().err
    assert not (folder / "report.html").exists()
    assert "](docs%20results/mat-against-nodes.svg)" in markdown.read_text("utf-8")
    assert run(["bench", "report", str(folder)]) == 0
    assert "<svg" in (folder / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{", "not JSON"),
        ("[1]", "not a result"),
        ("[" * 100_000, "not JSON"),
        ('{"rest_local_result": 2, "kind": "replay"}', "format 2"),
        ('{"rest_local_result": 1}', "a field is missing"),
        (json.dumps({"rest_local_result": 1, **json.loads("{}"), "machine": {}}), "a field is missing"),
    ],
)  # fmt: skip
def test_a_folder_without_a_usable_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, cause: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert run(["bench", "report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "a.json: " in error
    assert cause in error
    assert error.count("\n") == 1


def test_an_empty_folder_says_what_fills_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "report", str(tmp_path)]) == 1
    assert "`rest-local bench suite DIR`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        {}, {"curves": []}, replay_data(curves={"x": {}}), replay_data(sweep=[{}]), replay_data(curves=7),
        replay_data(curves={"x": curve(1.0, by_source={"context": {}})}),
        replay_data(curves={"x": curve(1.0) | {"speedup": "1"}}),
    ],
)  # fmt: skip
def test_a_damaged_result_is_left_out_and_the_others_shown(tmp_path: Path, data: dict[str, Any]) -> None:
    made = make(folder_of(tmp_path / "r", bad=result(data), good=result(), other=result(kind="experiment/none")))
    assert [name for name, _ in made.left_out] == ["bad.json", "other.json"]
    assert "a field is missing or wrong" in made.left_out[0][1]
    assert "knows no measurement 'experiment/none'" in made.left_out[1][1]
    assert len(made.results) == 1


@pytest.mark.parametrize("field", ["kind", "seconds", "quick", "data", "started"])
def test_fields_of_a_wrong_type_are_refused(tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "r", a=result())
    content = json.loads((folder / "a.json").read_text())
    content[field] = None
    (folder / "a.json").write_text(json.dumps(content))
    assert run(["bench", "report", str(folder)]) == 1
    assert f"{field} is NoneType" in capsys.readouterr().err
