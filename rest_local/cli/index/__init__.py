"""`rest-local index`: build, change, look into, move and remove datastores."""

from rest_local.cli.index import building, checking, moving, pruning, removing, showing, sourcing, stats, watching
from rest_local.cli.index.common import index

__all__ = ["building", "checking", "index", "moving", "pruning", "removing", "showing", "sourcing", "stats", "watching"]
