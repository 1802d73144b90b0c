"""`rest-local index`: build, change, look into and remove datastores."""

from rest_local.cli.index import building, checking, removing, showing, watching
from rest_local.cli.index.common import index

__all__ = ["building", "checking", "index", "removing", "showing", "watching"]
