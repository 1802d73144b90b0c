"""Change an index: update, remove and merge it, and watch files."""
