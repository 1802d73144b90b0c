"""Which projector lies with a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rest_local.catalog.stores import projector_of


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["gemma-3-4b-it-Q8_0.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-Q4_K_M.gguf", ["b-Q4_K_M.gguf", "mmproj-F16.gguf"], None),
        ("a-7b-Q4_K_M.gguf", ["b-7b-Q4_0.gguf", "mmproj-b-7b-f16.gguf"], None),
        ("b-7b-Q4_0.gguf", ["a-7b-Q4_K_M.gguf", "mmproj-b-7b-f16.gguf"], "mmproj-b-7b-f16.gguf"),
        (
            "Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf",
            ["mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf"],
            "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        ),
        ("Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf", ["mmproj-Qwen2.5-VL-72B-Instruct-f16.gguf", "c.gguf"], None),
        (
            "llava-v1.5-7b-Q4_K.gguf",
            ["llava-v1.5-7b-mmproj-model-f16.gguf", "x.gguf"],
            "llava-v1.5-7b-mmproj-model-f16.gguf",
        ),
        ("big-00001-of-00002.gguf", ["big-00002-of-00002.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("model.gguf", ["readme.md", "mmproj.txt", "vocab.gguf"], None),
        ("model.gguf", [], None),
    ],
)
def test_the_projector_next_to_a_model(model: str, others: list[str], expected: str | None, tmp_path: Path) -> None:
    for name in (model, *others):
        (tmp_path / name).touch()
    found = projector_of(tmp_path / model)
    assert (found and found.name) == expected


def test_the_projector_in_another_snapshot_of_the_repository(tmp_path: Path) -> None:
    """It was downloaded at another time, when the main branch was elsewhere."""
    shots = tmp_path / "models--user--repo" / "snapshots"
    for name in ("aaa/Q4/model-Q4_K_M.gguf", "bbb/mmproj-F16.gguf"):
        (shots / name).parent.mkdir(parents=True, exist_ok=True)
        (shots / name).touch()
    assert projector_of(shots / "aaa/Q4/model-Q4_K_M.gguf") == shots / "bbb/mmproj-F16.gguf"
