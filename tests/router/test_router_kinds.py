"""A model that generates next to models that only embed or rerank, in one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.router.conftest import Routed, choice
from tests.support.encoders import MEAN_POOLING, RANK_POOLING, encoder


def test_each_kind_of_model_answers_its_calls(
    routed: Callable[..., Routed], files: Callable[..., list[Path]], tmp_path: Path
) -> None:
    (chat,) = files("chat")
    embed, rank = tmp_path / "embed.gguf", tmp_path / "rank.gguf"
    encoder(embed, MEAN_POOLING)
    encoder(rank, RANK_POOLING)
    live = routed([choice(chat), choice(embed), choice(rank)])
    vectors = live.ask("embed", "/v1/embeddings", input=["a b", "c"]).json()["data"]
    assert [len(row["embedding"]) for row in vectors] == [len(vectors[0]["embedding"])] * 2
    ranked = live.ask("rank", "/v1/rerank", query="a", documents=["b", "c", "a"], top_n=2).json()
    assert len(ranked["results"]) == 2
    assert ranked["model"] == "rank"
    for model in ("embed", "rank"):
        refused = live.ask(model, "/completion", prompt="a")
        assert refused.status_code == 501, refused.text
    assert live.ask("chat", "/v1/rerank", query="a", documents=["b"]).status_code == 501
    assert live.ask("chat").status_code == 200
