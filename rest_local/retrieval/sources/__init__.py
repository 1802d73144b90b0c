"""Read the text of a datastore: one module for each kind of source, and a registry of them."""

from rest_local.retrieval.sources.recipes import from_recipe, source_of
from rest_local.retrieval.sources.records import Jsonl, Stdin, Transcripts
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import Walk

__all__ = ["Jsonl", "Reading", "Source", "Stdin", "Transcripts", "Walk", "from_recipe", "source_of"]
