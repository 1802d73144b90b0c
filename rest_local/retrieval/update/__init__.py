"""Changing an index: updates, removals, merges, and watching files."""
