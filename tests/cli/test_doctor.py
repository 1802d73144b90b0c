"""`rest-local doctor`: what is reported of the installation, the machine and the model."""

import json
import sys
from pathlib import Path

import pytest
from fake_cli_engine import Call, Install

from rest_local.calibration.cost import SIZES, CostCurve, Deviations
from rest_local.calibration.measuring import Timing
from rest_local.calibration.tuning import estimated
from rest_local.cli import doctor
from rest_local.cli.doctor import cost_rows, cost_table


def test_json_holds_what_was_measured(fake_engine: Install, call: Call) -> None:
    fake_engine()
    facts = json.loads(call("doctor", "--json").out)
    assert (facts["drafting"]["kind"], facts["drafting"]["reason"]) == ("tree", "attention only")
    assert facts["drafting"]["lookups"].startswith("if the expected saving")  # A lookup takes 6% of a step here.
    assert {"n_ctx": 512, "n": 8, "ratio": 3.25, "ms": 8.125, "certain": False} in facts["cost_curve"]
    assert facts["self_test"] == {"rows": 492, "flips": 0}
    assert facts["versions"]["rest-local"]
    assert "llama-cpp-python" in facts["versions"]
    assert isinstance(facts["gpu_offload"], bool)


def test_it_shows_how_answers_are_sampled_and_why(fake_engine: Install, call: Call) -> None:
    fake_engine()
    given = ("--temperature", "0.25", "--dry-multiplier", "0.5", "--samplers", "dry;top_k;temperature")
    facts = json.loads(call("doctor", "--json", *given).out)["sampling"]
    assert facts["temperature"] == {"value": 0.25, "from": "option"}
    assert facts["top_k"] == {"value": 40, "from": "default"}
    shown = call("doctor", *given).out.split("\nsampling\n")[1].split("\n\n")[0].splitlines()
    assert [line.split(maxsplit=1) for line in shown[:2]] == [
        ["temperature", "0.25 (option)"],
        ["top_k", "40 (default)"],
    ]
    assert shown[-1].split(maxsplit=1) == ["dry_multiplier", "0.5 (option)"]


def test_costs_are_shown_for_contexts_that_a_request_can_have_and_that_were_measured() -> None:
    sizes = [1, 2, 64]
    fresh, name = estimated([(1, Timing(9.0)), (2, Timing(11.0))], "CPU", 1e-4)
    assert name
    assert [(row["n_ctx"], row["certain"]) for row in cost_rows(fresh, 8192)] == [(0, False)] * len(SIZES)
    measured = CostCurve.from_points([64, 2048, 4096], sizes, [[9.0, 11.0, 70.0]] * 3, Deviations.of(0.05, 0.05, 0.05))
    assert sorted({row["n_ctx"] for row in cost_rows(measured, 3072)}) == [64, 2048]
    assert all(row["certain"] for row in cost_rows(measured, 3072))
    assert all(len(line) <= 80 for line in cost_table(cost_rows(fresh, 8192)))


@pytest.mark.parametrize("busy", [True, False])
def test_times_that_other_programs_make_longer_are_said_to_be_so(
    fake_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr("rest_local.llama.cores.others_run", lambda: busy)
    fake_engine()
    assert ("other programs are running, so what was just measured took too long" in call("doctor").out) == busy
    assert json.loads(call("doctor", "--json").out)["others_run"] == busy


def test_it_says_how_to_install_an_extra(fake_engine: Install, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine()
    monkeypatch.setitem(doctor.EXTRAS, "ray", ("no_such_module", "clusters"))
    monkeypatch.setitem(doctor.EXTRAS, "images", ("json", "images"))
    shown = [line.split(maxsplit=1) for line in call("doctor").out.split("\nextras\n")[1].split("\n\n")[0].splitlines()]
    assert ["ray", "pip install 'rest-local[ray]' (clusters)"] in shown
    assert ["images", "installed"] in shown
    assert json.loads(call("doctor", "--json").out)["extras"]["images"]["installed"]


def test_the_installation_is_shown_even_if_no_model_can_be_opened(call: Call, tmp_path: Path) -> None:
    done = call("doctor", "-m", str(tmp_path))
    assert done.code == 1
    assert done.out.startswith("versions\n  rest-local ")
    assert done.err.endswith("is a directory; give a GGUF file, or a name that `rest-local models` lists\n")


def test_a_library_that_is_missing_in_use_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rest_local.decoding.engine", None)
    done = call("generate", "x")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert done.err.endswith("; `pip install rest-local` installs what is needed\n")
