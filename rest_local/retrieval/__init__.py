"""Search text by context, on disk and in memory. Imports no model code and can be used on its own."""

from rest_local.paths import datastores_home
from rest_local.retrieval.building.build import build
from rest_local.retrieval.building.indexing import (
    Built,
    build_datastore,
    build_from_sources,
    build_from_texts,
)
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import tokenize_documents
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.history import History, forget_history, history_home, list_histories
from rest_local.retrieval.home import datastore_path, list_datastores
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Rows
from rest_local.retrieval.segment import Segment
from rest_local.retrieval.sources.source import Skipped
from rest_local.retrieval.staging import remove

__all__ = [
    "MAX_DEPTH", "MAX_MATCH", "Built", "Datastore", "GrowingText", "History", "Rows", "Segment", "Skipped",
    "VocabularyId", "build", "build_datastore", "build_from_sources", "build_from_texts", "datastore_path",
    "datastores_home", "forget_history", "history_home", "list_datastores", "list_histories",
    "remove", "tokenize_documents",
]  # fmt: skip
