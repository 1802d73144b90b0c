"""`rest-local index`: build, change, look into and remove datastores."""

from rest_local.cli.index import build, change, show  # noqa: F401  They add their commands to the group.
from rest_local.cli.index.group import index

__all__ = ["index"]
