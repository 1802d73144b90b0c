"""Drafting: the draft tree, candidates from every source, and draft models."""
