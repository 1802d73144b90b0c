"""Measure what a batch costs on this machine, choose settings, and run the self-test of exact decoding."""
