"""`rest-local index`: build, change, look into and remove datastores."""

from rest_local.cli.index import building, changing, checking, forgetting, pruning, removing, showing, sourcing
from rest_local.cli.index.common import index

__all__ = ["building", "changing", "checking", "forgetting", "index", "pruning", "removing", "showing", "sourcing"]
