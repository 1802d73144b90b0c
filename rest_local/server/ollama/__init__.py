"""Ollama's API for clients that know nothing else: `/api/chat`, `/api/generate`, `/api/embed` and what lists models.

Its bodies become those of the server's own calls (`translation`), so that an answer is the same by every protocol; what
is written back has Ollama's shape (`answers`, `listing`).
"""
