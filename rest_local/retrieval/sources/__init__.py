"""Where the text of a datastore comes from: one module for each kind of source, and a registry of them."""

from rest_local.retrieval.sources.chat import Chat
from rest_local.retrieval.sources.git_source import Git
from rest_local.retrieval.sources.jsonl import Jsonl
from rest_local.retrieval.sources.parquet import Parquet
from rest_local.retrieval.sources.python import Python
from rest_local.retrieval.sources.registry import from_recipe, is_repeatable, measure, read, source_of
from rest_local.retrieval.sources.source import Reading, Render, Source
from rest_local.retrieval.sources.stdin import Stdin
from rest_local.retrieval.sources.walk import Walk

__all__ = [
    "Chat",
    "Git",
    "Jsonl",
    "Parquet",
    "Python",
    "Reading",
    "Render",
    "Source",
    "Stdin",
    "Walk",
    "from_recipe",
    "is_repeatable",
    "measure",
    "read",
    "source_of",
]
