"""The recorder of terminals: the frames of a real command, and an SVG that shows them in order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from support.scripts import load_script

SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = """
import os, time
print(f"{os.get_terminal_size().columns} columns", flush=True)
time.sleep(0.3)
print("\\033[1;32mgreen\\033[0m <&> \\033[4munder\\033[0m", flush=True)
time.sleep(0.3)
print("\\033[2Jend")
"""


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    return load_script(Path(__file__).parents[1] / "scripts" / "record_terminal.py", "record_terminal")


def texts(frame: ElementTree.Element, lines: dict[str, str]) -> list[str]:
    return [lines[use.attrib["href"][1:]] for use in frame.iter(f"{SVG}use")]


def test_a_recording_shows_what_a_terminal_shows(recorder: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "run.svg"
    assert recorder.main([str(output), "--columns", "50", "--rows", "5", "--", sys.executable, "-c", PROGRAM]) == 0
    root = ElementTree.parse(output).getroot()
    lines = {
        each.attrib["id"]: "".join(each.itertext())
        for each in root.iter(f"{SVG}g")
        if each.get("id", "").startswith("l")
    }
    frames = [each for each in root.iter(f"{SVG}g") if each.get("class") == "f"]
    shown = [texts(frame, lines) for frame in frames]
    assert ["50 columns"] in shown
    assert ["50 columns", "green <&> under"] in shown
    assert shown[-1] == ["end"]
    assert shown.index(["50 columns"]) < shown.index(["50 columns", "green <&> under"])
    styles = [piece.attrib for piece in root.iter(f"{SVG}tspan") if piece.text in ("green", "under")]
    assert styles[0]["fill"] == recorder.COLOURS["green"]
    assert styles[0]["font-weight"] == "bold"
    assert styles[1]["text-decoration"] == "underline"


def test_each_frame_is_visible_from_its_time_to_that_of_the_next(recorder: ModuleType) -> None:
    line = (("a", ""),)
    frames = [recorder.Frame(0.0, ((), ())), recorder.Frame(1.0, (line, ())), recorder.Frame(3.0, (line, line))]
    text = recorder.svg(frames, 10, "title", speed=2.0)
    assert "title (2 x the real speed)" in text
    assert "@keyframes k0{0.000%,16.666%{visibility:visible}16.667%,100%{visibility:hidden}}" in text
    assert "16.667%,49.999%{visibility:visible}50.000%,100%{visibility:hidden}" in text
    assert "50.000%,99.999%{visibility:visible}}" in text
    assert text.count("3.00s step-end infinite") == 3
    assert text.count('id="l') == 1


def test_a_command_that_fails_leaves_no_picture(recorder: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "run.svg"
    assert recorder.main([str(output), "--", sys.executable, "-c", "import sys; sys.exit(3)"]) == 3
    assert not output.exists()
