"""Developer measurements: run `python -m benchmarks.NAME` from a checkout. Nothing here is a timed test."""
