"""`rest-local bench`: measure drafting."""

from rest_local.cli.bench import build, compare, experiment, lookup, replay, report, sizes, suite
from rest_local.cli.bench.common import bench

__all__ = ["bench", "build", "compare", "experiment", "lookup", "replay", "report", "sizes", "suite"]
