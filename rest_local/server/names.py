"""Names of models as clients write them. Knows no HTTP.

Ollama's clients write a model as NAME:TAG, and add `:latest` to a name without a tag. Other clients write the name as
it is listed. A name is only compared, never used as a path.
"""

from __future__ import annotations

from collections.abc import Collection

TAG = ":latest"


def find_name(asked: str, names: Collection[str]) -> str | None:
    """The one of `names` that a client means: the same, or the same without `:latest`; None where there is none."""
    return next((name for name in (asked, asked.removesuffix(TAG), f"{asked}{TAG}") if name in names), None)


def tagged(name: str) -> str:
    """The name as Ollama lists it: with `:latest` where it has no tag."""
    return name if ":" in name else f"{name}{TAG}"
