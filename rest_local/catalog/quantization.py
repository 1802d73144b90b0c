"""Name quantizations from file names and GGUF headers, prefer one if none was named, and print sizes.

Pure functions of text and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# enum llama_ftype, which `general.file_type` holds; a test compares it with the package `gguf`
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip

# With about 5 bits a weight, a model answers almost like its original and is read in a third of the time. Above 6 bits
# it only grows, below 4 bits answers get visibly worse. The order is that of llama.cpp's own recommendation.
PREFERRED = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_L", "Q4_K_S", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4", "Q5_K_M", "Q5_K_S", "Q5_0",
    "MXFP4_MOE", "MXFP4", "Q6_K", "Q8_0",
)  # fmt: skip

_LABEL = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]{1,4}){0,3}|TQ\d_\d|BF16|F16|F32|FP16|FP32|NVFP4|MXFP4(?:_MOE)?)", re.IGNORECASE
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def stem_of(path: str) -> str:
    """Return the name of a file without its folder, `.gguf` and the number of a part."""
    name = path.replace("\\", "/").rpartition("/")[2]
    return _PART.sub("", name[: -len(".gguf")] if name.lower().endswith(".gguf") else name)


def label_of(path: str) -> str:
    """Return the quantization in a name in capitals (`Q4_K_M` for `x-q4_k_m-00001-of-00002.gguf`), else the stem."""
    stem = stem_of(path)
    found = [
        match[0]
        for match in _LABEL.finditer(stem)
        if _is_apart(stem, match.start() - 1) and _is_apart(stem, match.end())
    ]
    return found[-1].upper() if found else stem


def _is_apart(text: str, at: int) -> bool:
    return not 0 <= at < len(text) or text[at] in "-._ "


def is_meant(wanted: str, path: str) -> bool:
    """Return True if `wanted` is this file's quantization, or its name with or without `.gguf`, ignoring case."""
    names = {label_of(path), stem_of(path), path, path.rpartition("/")[2]}
    names |= {name.removeprefix("UD-") for name in names}
    return wanted.casefold() in {name.casefold() for name in names}


def preferred(labels: Iterable[str]) -> str | None:
    """Return the first of `PREFERRED` that is among the labels."""
    there = set(labels)
    return next((label for label in PREFERRED if label in there), None)


def is_model_file(path: str) -> bool:
    """Return True if the name is not that of a projector, an importance matrix or a vocabulary."""
    name = path.replace("\\", "/").rpartition("/")[2].lower()
    other = name.startswith("ggml-vocab-") or "imatrix" in name or "mmproj" in name
    return name.endswith(".gguf") and not other


def in_bytes(size: float) -> str:
    """Print a size in decimal units: `4.7 GB`, `16 MB`."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
