"""Check and repair an index."""
