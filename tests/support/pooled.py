"""Models that say how their tokens' vectors become one, as embedding models do."""

from pathlib import Path

from support.keys import with_keys


def with_pooling(source: Path, target: Path, kind: int) -> Path:
    """Copy a model, and say in it how its tokens' vectors become one."""
    return with_keys(source, target, {"{arch}.pooling_type": kind})
