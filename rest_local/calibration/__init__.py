"""Calibration: what a batch costs on this machine, which settings and threads, the self-test of exact decoding."""
