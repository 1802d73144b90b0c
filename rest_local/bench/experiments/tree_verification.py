"""Verification of a tree in one batch against independent evaluation of every branch, one `llama_decode` for each.

Trees have 1 to 8 branches of 1 to 8 tokens, which part at the root or after half of their tokens. One branch is the
text itself, the others are pieces of it from other places. Both ways evaluate the root, give the logits of every node
and free the cells again. They alternate, and `ratio` is the median over pairs of the time of all branches by that of
the tree, so other programs disturb it little.

Before, without a clock, every row of logits of a tree is compared with that of its branch evaluated alone: all bits
(`different`), and the likeliest token (`flips`, with the largest gap between the two best logits there). llama.cpp
chooses kernels by the size of a batch, so rows may differ in their last bits (`calibration.exactness`).

The demo model is measured, and the model of `Inputs` if another one is given. Weights do not matter for times, so a
synthetic model does, such as `python -m benchmarks.synthetic 0.5B Q4_0 OUT.gguf` writes in a checkout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.calibration.exactness import Comparison, Runner
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.errors import DecodeFailed, OptionError
from rest_local.kv_cache.backend import remove_tail
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.paths import demo_model

NAME = "tree-verification"
SUMMARY = "One batch for a tree against one decode for each branch: time and logits."

BRANCHES, DEPTHS = (1, 2, 4, 8), (1, 2, 4, 8)
BRANCHES_QUICK, DEPTHS_QUICK = (1, 4), (4,)
MOST_NODES = 63  # with the root the most rows of logits of a step
PREFIX = 256  # tokens of context before the tree
PLACES, PAIRS = 2, 5
PLACES_QUICK, PAIRS_QUICK = 1, 3


@dataclass(frozen=True)
class Shape:
    """`branches` of `depth` tokens, of which the first `shared` are the same in all."""

    branches: int
    depth: int
    shared: int = 0

    @property
    def name(self) -> str:
        """For tables and the journal."""
        return f"{self.branches} x {self.depth}" + (f", {self.shared} shared" if self.shared else "")


def shapes(quick: bool) -> Iterator[Shape]:
    """All shapes of at most MOST_NODES nodes."""
    for branches in BRANCHES_QUICK if quick else BRANCHES:
        for depth in DEPTHS_QUICK if quick else DEPTHS:
            for shared in {0, depth // 2} if branches > 1 else {0}:
                if shared + branches * (depth - shared) <= MOST_NODES:
                    yield Shape(branches, depth, shared)


def branches_of(shape: Shape, text: Sequence[int], at: int, random: np.random.Generator) -> list[list[int]]:
    """The tokens of each branch after the root `text[at]`. The first branch follows the text."""
    trunk = list(text[at + 1 : at + 1 + shape.depth])
    found = [trunk]
    while len(found) < shape.branches:
        begin = int(random.integers(0, len(text) - shape.depth))
        branch = [*trunk[: shape.shared], *text[begin + shape.shared : begin + shape.depth]]
        if branch[shape.shared] not in [other[shape.shared] for other in found]:
            found.append(branch)
    return found


def tree_of(branches: Sequence[Sequence[int]]) -> tuple[DraftTree, list[list[int]]]:
    """The tree, in which common beginnings are there once, and the nodes of each branch."""
    tree, paths = DraftTree(len(branches)), []
    for branch in branches:
        node, path = ROOT, []
        for token in branch:
            child = tree.child(node, token)
            node = tree.add(token, node, 1.0, 0) if child is None else child
            path.append(node)
        paths.append(path)
    return tree, paths


class Trial:
    """One tree below one place of a text, in the cells of a context."""

    def __init__(self, context: Context, text: Sequence[int], at: int, branches: Sequence[Sequence[int]]) -> None:
        """Evaluates the text before the root. Raises DecodeFailed."""
        self.context, self.at, self.root, self.branches = context, at, text[at], branches
        self.tree, self.paths = tree_of(branches)
        context.clear()
        self.runner = Runner(context)
        self.runner.prefill(text[at - PREFIX : at])
        self.slot = Slot(context)
        self.slot.tokens, self.slot.n_past = list(text[at - PREFIX : at + 1]), PREFIX

    def together(self) -> tuple[list[int], Any]:
        """Evaluate the tree. Returns its nodes in the order of the batch, and a view of the logits."""
        layout = self.tree.layout()
        self.slot.fill_step(self.tree, layout)
        if code := self.context.decode():
            raise DecodeFailed(code, 1 + len(self.tree))
        rows = self.context.logits(1 + len(self.tree))
        if not remove_tail(self.context, PREFIX):
            raise DecodeFailed(-1, 1 + len(self.tree))
        return layout.order, rows

    def alone(self) -> Iterator[Any]:
        """Evaluate each branch with the root. Yields a view of the logits."""
        for branch in self.branches:
            yield self.runner.evaluate([self.root, *branch], keep=0)

    def compared(self) -> Comparison:
        """Every row of every branch in the tree with the same row alone."""
        result = Comparison()
        order, rows = self.together()
        rows = rows.copy()
        place = {node: row for row, node in enumerate(order, 1)}
        for path, own in zip(self.paths, self.alone(), strict=True):
            for number, row in enumerate([0, *(place[node] for node in path)]):
                result.add(own[number], rows[row])
        return result

    def pair(self, tree_first: bool) -> tuple[float, float]:
        """Milliseconds of the tree and of all branches."""
        taken = {}
        for which in (True, False) if tree_first else (False, True):
            begun = time.perf_counter()
            if which:
                self.together()
            else:
                for _ in self.alone():
                    pass
            taken[which] = 1e3 * (time.perf_counter() - begun)
        return taken[True], taken[False]


def measure(
    context: Context, text: Sequence[int], shape: Shape, places: int, pairs: int, random: np.random.Generator
) -> dict[str, Any]:
    """The row of one shape. Raises DecodeFailed, OptionError for a text that is too short."""
    last = len(text) - shape.depth - 1
    if last <= PREFIX:
        raise OptionError(f"a text of {len(text)} tokens is too short; at least {PREFIX + shape.depth + 2} are needed")
    comparison, times, nodes = Comparison(), [], []
    for at in random.integers(PREFIX, last, places).tolist():
        trial = Trial(context, text, at, branches_of(shape, text, at, random))
        nodes.append(len(trial.tree))
        comparison.merge(trial.compared())
        times += [trial.pair(number % 2 == 0) for number in range(pairs)]
    return {
        **asdict(shape),
        "nodes": round(sum(nodes) / len(nodes), 1),
        "tree_ms": round(median(tree for tree, _ in times), 3),
        "branches_ms": round(median(alone for _, alone in times), 3),
        "ratio": round(median(alone / tree for tree, alone in times), 3),
        "pairs": len(times),
        **comparison.to_dict(),
    }


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """A row for each shape and model. 15 s with the demo model on one core; some minutes with 0.5B; quick: 5 s.

    Raises ModelError, DecodeFailed, for instance where a model's memory cannot remove a part of a text.
    """
    models = {path.name: path for path in (demo_model(), inputs.model_path)}
    found = {}
    for name, path in models.items():
        wanted = list(shapes(inputs.quick))
        if any(f"{name}/{shape.name}" not in journal for shape in wanted):
            _measure_model(inputs, journal, name, path, wanted)
        found[name] = [journal[f"{name}/{shape.name}"] for shape in wanted]
    return {"models": found, "prefix": PREFIX, "settings": ContextSettings().to_dict()}


def _measure_model(inputs: Inputs, journal: Journal, name: str, path: Path, wanted: Sequence[Shape]) -> None:
    settings = ContextSettings(n_ctx=1024)
    with Model.open(path) as model, Context(model, settings) as context:
        text = _text(model)
        for number, shape in enumerate(wanted):
            if (unit := f"{name}/{shape.name}") in journal:
                continue
            places, pairs = (PLACES_QUICK, PAIRS_QUICK) if inputs.quick else (PLACES, PAIRS)
            journal.put(unit, measure(context, text, shape, places, pairs, inputs.random(number)))
            inputs.tell(f"measured: {unit}")


def _text(model: Model) -> list[int]:
    """Tokens of held-out modules, some thousands."""
    paths = [standard_library() / module for module in held_out_modules()[:3]]
    text = "".join(path.read_text("utf-8") for path in paths if path.is_file())
    tokens: list[int] = model.vocabulary.tokenize(text[:40_000]).tolist()
    return tokens


def section(result: Result) -> Section:
    """Words, a table for each model, and the ratio by nodes."""
    models: dict[str, list[dict[str, Any]]] = result.data["models"]
    columns = (
        "branches x tokens",
        "nodes",
        "tree ms",
        "branches ms",
        "ratio",
        "rows",
        "other bits",
        "other best token",
    )
    return Section(
        title="Tree verification",
        command=result.command,
        words=[
            "Trees were evaluated in one batch, and then branch by branch, one decode for each; both alternated.",
            *(_words(name, rows) for name, rows in models.items()),
        ],
        tables=[
            Table(
                f"One batch for a tree against one decode for each branch: {name}",
                columns,
                [
                    [
                        _shape(row).name,
                        *(row[key] for key in ("nodes", "tree_ms", "branches_ms", "ratio")),
                        *(row[key] for key in ("rows", "different", "flips")),
                    ]
                    for row in rows
                ],
                note="Ratio: median over pairs of the time of all branches by that of the tree. Other bits, other best "
                "token: rows of logits that differ from those of the branch alone.",
            )
            for name, rows in models.items()
        ],
        figures=[
            Figure(
                name="tree-verification",
                title="Time of all branches one by one, by that of the tree in one batch",
                x="branches",
                y="ratio",
                series=[
                    Series(f"{name}, {depth} tokens", *_line(rows, depth))
                    for name, rows in models.items()
                    for depth in sorted({row["depth"] for row in rows})
                ],
                alt="Lines: how many times as long independent branches take, by their number, for each depth.",
                level=1.0,
            )
        ],
        machine=result.machine.line(),
    )


def _shape(row: dict[str, Any]) -> Shape:
    return Shape(row["branches"], row["depth"], row["shared"])


def _line(rows: Sequence[dict[str, Any]], depth: int) -> tuple[list[float], list[float]]:
    """Ratios and numbers of branches of the trees that part at the root."""
    own = [row for row in rows if row["depth"] == depth and not row["shared"]]
    return [row["ratio"] for row in own], [row["branches"] for row in own]


def _words(name: str, rows: Sequence[dict[str, Any]]) -> str:
    several = [row for row in rows if row["branches"] > 1] or list(rows)
    best, worst = max(several, key=lambda row: row["ratio"]), min(several, key=lambda row: row["ratio"])
    compared, different, flips = (sum(row[key] for row in rows) for key in ("rows", "different", "flips"))
    words = (
        f"{name}: one by one the branches take {best['ratio']:.2f} times as long as the tree at most "
        f"({_shape(best).name}) and {worst['ratio']:.2f} times at least ({_shape(worst).name}). "
    )
    if not different:
        return words + f"All {compared} rows of logits have the same bits."
    gap = max(row["largest_gap"] for row in rows)
    flipped = (
        f"{flips} have another likeliest token, where the two best were at most {gap:.3f} apart."
        if flips
        else "The likeliest token is the same in all of them."
    )
    return words + f"Of {compared} rows of logits {different} differ in some bits. {flipped}"
