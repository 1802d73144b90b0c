"""`rest-local index`: build, change, look into, move and remove datastores."""

from rest_local.cli.index import (  # noqa: F401  importing a module adds its commands to the group
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
    watching,
)
from rest_local.cli.index.common import index

__all__ = ["index"]
