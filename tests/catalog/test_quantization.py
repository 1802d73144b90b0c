"""What names of files say about quantizations."""

from __future__ import annotations

import pytest

from rest_local.catalog.quantization import is_model_file, label_of


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Llama-3.2-3B-Instruct-Q8_0.gguf", "Q8_0"),
        ("gemma-3-4b-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model.Q4_K_S.gguf", "Q4_K_S"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("X-IQ2_XXS.gguf", "IQ2_XXS"),
        ("X-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("X-TQ1_0.gguf", "TQ1_0"),
        ("q8_0/plain.gguf", "plain"),
        ("Qwen3.gguf", "Qwen3"),
        ("f16ish.gguf", "f16ish"),
    ],
)
def test_label(path: str, label: str) -> None:
    assert label_of(path) == label


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.gguf", True),
        ("a/B.GGUF", True),
        ("a/mmproj-B-f16.gguf", False),
        ("B.imatrix.gguf", False),
        ("ggml-vocab-qwen2.gguf", False),
        ("B.safetensors", False),
    ],
)
def test_files_that_are_no_models(path: str, expected: bool) -> None:
    assert is_model_file(path) is expected
