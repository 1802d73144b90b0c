"""The HTTP server: the calls of several protocols on top of the engine's service."""
