"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from rest_local.calibration.cost import CostCurve
from rest_local.planning.auto import Auto
from rest_local.planning.off import Off
from rest_local.planning.policy import Policy
from rest_local.planning.respec import ReSpec
from rest_local.planning.rest import Rest
from rest_local.planning.sam import Sam

_MAKERS: dict[str, Callable[[CostCurve], Policy]] = {
    "off": lambda curve: Off(),
    "auto": Auto,
    "rest": lambda curve: Rest(),
    "sam": lambda curve: Sam(),
    "respec": lambda curve: ReSpec(),
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, curve: CostCurve) -> Policy:
    """A fresh policy over a cost curve. KeyError where there is none of this name; see POLICIES."""
    return _MAKERS[name](curve)
