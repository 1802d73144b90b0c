"""The survey tries every combination once, detects the effect of other sequences, and is bounded in time."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import FakeBackend, logits_of

from rest_local.calibration.exactness import compare_drafts, rows_alone
from rest_local.calibration.survey import survey
from rest_local.errors import ModelError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, ModelOptions

TinyModel = Callable[..., Path]
TEXT = np.random.default_rng(3).integers(0, 20, 80).tolist()


def _backend() -> FakeBackend:
    return FakeBackend(n_ctx=512, n_slots=2)


@pytest.mark.parametrize("drafts", ["chains", "trees"])
@pytest.mark.parametrize("neighbour", [False, True])
def test_an_exact_backend_has_no_difference(drafts: str, neighbour: bool) -> None:
    backend = _backend()
    reference = rows_alone(backend, TEXT)
    result = compare_drafts(backend, TEXT, reference, drafts, 16, neighbour)  # type: ignore[arg-type]
    assert result.exact
    assert result.rows >= len(TEXT) - 1
    assert backend.cells == []


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_a_dependence_on_cells_of_other_sequences_is_found(drafts: str) -> None:
    backend = _backend()
    reference = rows_alone(backend, TEXT)

    def compute(history: Sequence[int], n: int) -> np.ndarray:
        others = any(id_ >= backend.n_branches for cell in backend.cells for id_ in cell.ids)
        return logits_of(history) * np.float32(1.001 if others else 1.0)

    backend.compute = compute
    assert compare_drafts(backend, TEXT, reference, drafts, 16).exact  # type: ignore[arg-type]
    result = compare_drafts(backend, TEXT, reference, drafts, 16, True)  # type: ignore[arg-type]
    assert result.different == result.rows


@pytest.mark.parametrize("drafts", ["chains", "trees"])
def test_rounding_by_batch_size_is_found(drafts: str) -> None:
    def rounded(history: Sequence[int], n: int) -> np.ndarray:
        return logits_of(history) + np.float32(1e-4 if n > 1 else 0.0)

    def flipped(history: Sequence[int], n: int) -> np.ndarray:
        row = logits_of(history)
        return row if n == 1 else -row

    backend = _backend()
    reference = rows_alone(backend, TEXT)
    backend.compute = rounded
    result = compare_drafts(backend, TEXT, reference, drafts, 16)  # type: ignore[arg-type]
    assert not result.exact
    assert result.flips == 0
    backend.compute = flipped
    result = compare_drafts(backend, TEXT, reference, drafts, 16)  # type: ignore[arg-type]
    assert result.flips > 0
    assert result.largest_gap > 0
    assert result.to_dict()["flips_per_10000"] > 100


def test_a_survey_of_a_model(tiny_model: TinyModel) -> None:
    """Every open setting has enough rows of each kind of draft, and times relative to the fastest."""
    seen: list[tuple[str, int, int]] = []
    options = ModelOptions(flash_attention="off")
    with Model.open(tiny_model("llama", quant="Q8_0"), options=options) as model:
        result = survey(model, 1, 120, lambda *at: seen.append(at))
    assert [number for _, number, _ in seen] == [1, 2, 3]
    assert (result["drafting"], result["left_out"]) == ("tree", 0)
    assert [s["cache_type_k"] for s in result["settings"]] == list(FLOAT_CACHE_TYPES)
    assert min(s["plain"] for s in result["settings"]) == 1 == min(s["step"] for s in result["settings"])
    for setting in result["settings"]:
        assert [(case["drafts"], case["neighbours"]) for case in setting["cases"]] == [
            ("chains", False), ("chains", True), ("trees", False), ("trees", True),
        ]  # fmt: skip
        assert all(case["rows"] >= 23 for case in setting["cases"])


def test_a_model_gets_only_the_drafts_that_it_can_verify(tiny_model: TinyModel) -> None:
    options = ModelOptions(flash_attention="off", cache_type_k="f16", cache_type_v="f16")
    kinds = {}
    for arch in ("lfm2", "mamba"):
        with Model.open(tiny_model(arch, quant="Q8_0"), options=options) as model:
            result = survey(model, 1, 120, lambda *at: None)
        kinds[arch] = (result["drafting"], [case["drafts"] for case in result["settings"][0]["cases"]])
    assert kinds == {"lfm2": ("chain", ["chains", "chains"]), "mamba": ("chain", ["chains", "chains"])}


def test_a_refused_setting_is_reported(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Context, model: Model, settings: ContextSettings) -> None:
        raise ModelError("no such cache")

    monkeypatch.setattr(Context, "__init__", refuse)
    with Model.open(tiny_model("llama", quant="Q8_0"), options=ModelOptions(flash_attention="off")) as model:
        result = survey(model, 1, 120, lambda *at: None)
    assert [(s["refused"], s["cases"]) for s in result["settings"]] == [("no such cache", [])] * 3
    assert all(s["plain"] == 0 for s in result["settings"])
