"""Keeping an index: checks, repair, statistics, and moving it between machines."""
