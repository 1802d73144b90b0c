"""Decoding: the engine, one decode step for many requests, verification and scheduling."""
