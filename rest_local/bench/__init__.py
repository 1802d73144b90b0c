"""Measurements: they return dataclasses; printing is the command line's. Nothing here is a timed test."""
