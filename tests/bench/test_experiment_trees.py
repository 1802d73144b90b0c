"""Trees and branches: their shapes, and that both ways give the same logits on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rest_local.bench.experiments.tree_verification import PREFIX, Shape, branches_of, measure, shapes, tree_of
from rest_local.errors import OptionError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

TEXT = np.random.default_rng(1).integers(1, 250, PREFIX + 60).tolist()


def test_common_beginnings_are_in_a_tree_once() -> None:
    tree, paths = tree_of([[1, 2], [1, 3], [4]])
    assert len(tree) == 4
    assert paths == [[0, 1], [0, 2], [3]]
    assert [tree.path(path[-1]) for path in paths] == [[1, 2], [1, 3], [4]]


def test_branches_part_where_the_shape_says() -> None:
    for shape in (Shape(4, 6), Shape(4, 6, 3), Shape(1, 2)):
        branches = branches_of(shape, TEXT, 20, np.random.default_rng(0))
        assert branches[0] == TEXT[21 : 21 + shape.depth]
        assert {len(branch) for branch in branches} == {shape.depth}
        assert len(tree_of(branches)[0]) == shape.shared + shape.branches * (shape.depth - shape.shared)


def test_no_shape_has_more_nodes_than_a_step() -> None:
    assert Shape(8, 8) not in set(shapes(False))
    assert {Shape(8, 8, 4), Shape(1, 8), Shape(8, 4)} < set(shapes(False))
    assert set(shapes(True)) == {Shape(1, 4), Shape(4, 4), Shape(4, 4, 2)}


def test_a_tree_gives_the_logits_of_its_branches(tiny_model: Callable[..., Path]) -> None:
    with Model.open(tiny_model("llama")) as model, Context(model, ContextSettings(n_ctx=512)) as context:
        row = measure(context, TEXT, Shape(3, 4, 2), 2, 2, np.random.default_rng(0))
        with pytest.raises(OptionError, match="too short"):
            measure(context, TEXT[: PREFIX + 5], Shape(3, 4, 2), 1, 1, np.random.default_rng(0))
    assert row["rows"] == 2 * 3 * 5
    assert row["largest_change"] < 1e-3  # another token or another context would change a logit by far more
    assert row["nodes"] == 8
    assert row["pairs"] == 4
    assert row["ratio"] > 0
