"""`rest-local bench`: measure drafting."""

from rest_local.cli.bench import lookup, replay
from rest_local.cli.bench.common import bench

__all__ = ["bench", "lookup", "replay"]
