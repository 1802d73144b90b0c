"""`rest-local index`: build, change, look into, move and remove datastores."""

from rest_local.cli.index import (
    building,
    changing,
    checking,
    forgetting,
    moving,
    pruning,
    removing,
    showing,
    sourcing,
    stats,
)
from rest_local.cli.index.common import index

__all__ = [
    "building",
    "changing",
    "checking",
    "forgetting",
    "index",
    "moving",
    "pruning",
    "removing",
    "showing",
    "sourcing",
    "stats",
]
