"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from rest_local.calibration.cost import CostCurve
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off, Policy
from rest_local.planning.published import Rest, Sam
from rest_local.planning.respec import ReSpec

_MAKERS: dict[str, Callable[[CostCurve], Policy]] = {
    "off": lambda curve: Off(),
    "auto": Auto,
    "rest": lambda curve: Rest(),
    "sam": lambda curve: Sam(),
    "respec": lambda curve: ReSpec(),
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, curve: CostCurve) -> Policy:
    """A new policy over a cost curve. Raises KeyError if `name` is not in POLICIES."""
    return _MAKERS[name](curve)
