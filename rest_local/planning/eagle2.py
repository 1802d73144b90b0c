"""The dynamic tree of EAGLE-2 (arXiv 2406.16858) from any model that drafts, and a policy of it alone.

- Expand: of the nodes of a level, those with the highest joint confidence are continued in one pass of the model.
- Rerank: of all nodes, those with the highest joint confidence are submitted, shallow ones first. The confidence of a
  child is at most its parent's, so they are a tree.
- The paper's numbers: 10 nodes of a level are expanded, 6 levels, 60 nodes. Here a model gives at most TOP_K tokens for
  a path, one where it is confident, and continues at most BRANCHES paths of a text at a time (`drafting.models.seam`);
  and a step has its own limits of nodes and branches. A path that the model cannot continue any more stays a leaf.
- It drafts whatever it costs and learns nothing. A model that fails costs drafts only. With several requests in a step
  each asks the model by itself, in passes of its own: the paper decodes one request at a time.
- A text with many missing tokens is caught up with once a step, and drafted from when that is done.

`sam` and `respec` use the tree. The policy is for benchmarks (`Engine.generate(policy=Eagle2())`) and has no name:
without a drafting model, as in a replay, it would draft nothing.
"""

from __future__ import annotations

from rest_local.drafting.candidates import MODEL
from rest_local.drafting.growth import Draft
from rest_local.drafting.models.seam import BRANCHES, DraftText, Query
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.policy import NOTHING, Stateless, StepContext

EXPANDED = 10  # nodes of a level that are continued
DEPTH = 6  # levels
NODES = 60
AT_ANY_PRICE = 1e9  # milliseconds that a step without the model is said to lose, so that its text is caught up with

Path = tuple[int, ...]


class Eagle2(Stateless):
    """EAGLE-2 at every step; plain decoding without a drafting model."""

    name = "eagle2"

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """The tree of this step. No lookup is made."""
        return Draft(eagle2_tree(sources, at), skipped=True) if at.limit else NOTHING


class ModelTime:
    """Milliseconds that the drafting model takes from now on, which other times do not include."""

    def __init__(self, sources: Lookup) -> None:
        self._text = sources.draft_text
        self._before = self._text.step_ms if self._text else 0.0

    @property
    def ms(self) -> float:
        """So far."""
        return self._text.step_ms - self._before if self._text else 0.0


def can_draft(sources: Lookup) -> bool:
    """Whether there is a drafting model that has not failed, with room for the text."""
    text = sources.draft_text
    return text is not None and text.can_ask


def eagle2_tree(sources: Lookup, at: StepContext) -> DraftTree:
    """The tree of the drafting model, empty where it gives none. Takes at most DEPTH passes."""
    text = sources.draft_text
    if text is None or not text.can_ask:
        return DraftTree(at.leaves)
    try:
        found = _expand(text, at) if text.caught_up(AT_ANY_PRICE) else {}
    except Exception as error:  # costs drafts, never an answer
        text.drafter.give_up("failed", error)
        found = {}
    return _rerank(found, min(NODES, at.limit), at.leaves)


def _expand(text: DraftText, at: StepContext) -> dict[Path, float]:
    """Paths that the model drafts, each with its joint confidence."""
    width = min(EXPANDED, BRANCHES, at.leaves)
    found: dict[Path, float] = {}
    level: dict[Path, float] = {(): 1.0}
    for _ in range(min(DEPTH, at.limit)):  # a path has a node for each level
        asked = sorted(level, key=lambda path: -level[path])[:width]
        answers = text.drafter.answer([Query(text, path) for path in asked])
        level = {
            (*path, token): level[path] * confidence
            for path, likely in zip(asked, answers, strict=True)
            for token, confidence in likely
        }
        found |= level
        if not level:
            break
    return found


def _rerank(found: dict[Path, float], limit: int, leaves: int) -> DraftTree:
    """The tree of the `limit` likeliest paths that fit."""
    tree = DraftTree(leaves)
    nodes: dict[Path, int] = {(): ROOT}
    for path in sorted(found, key=lambda path: (-found[path], len(path))):
        parent = nodes.get(path[:-1])
        if len(tree) == limit:
            break
        if parent is not None and tree.can_add(parent):
            nodes[path] = tree.add(path[-1], parent, found[path], MODEL)
    return tree
