"""Measure, and return dataclasses, which the command line prints. Nothing here is a timed test."""
