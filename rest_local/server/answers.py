"""The shapes of OpenAI's answers: counts, times, log-probabilities. Knows nothing about HTTP or how text is made."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.stream import Piece, Result
    from rest_local.llama.vocabulary import Vocabulary

DRAFT_FIELDS = ("draft_n", "draft_n_accepted")


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(results: Sequence[Result], choices: int, predicted: bool) -> dict[str, Any]:
    """OpenAI's `usage` for `choices` answers to each prompt, next to each other in `results`.

    `predicted`: the client sent a prediction, and is told how much of it came true."""
    firsts = [result.timings for result in results[::choices]]
    cached = sum(int(timings["cache_n"]) for timings in firsts)
    prompt = cached + sum(int(timings["prompt_n"]) for timings in firsts)
    completion = sum(len(result.tokens) for result in results)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if predicted:
        of_prediction = [result.draft.get("by_source", {}).get("prediction", {}) for result in results]
        drafted = sum(source.get("drafted", 0) for source in of_prediction)
        accepted = sum(source.get("accepted", 0) for source in of_prediction)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return counts


def timings(results: Sequence[Result], shows_steps: bool) -> dict[str, float]:
    """llama-server's `timings` over all answers; what drafting did only where `shows_steps`."""
    names = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
    total = {name: sum(result.timings[name] for result in results) for name in (*names, *DRAFT_FIELDS)}
    for what in ("prompt", "predicted"):
        milliseconds = total[f"{what}_ms"]
        total[f"{what}_per_second"] = round(1e3 * total[f"{what}_n"] / milliseconds, 2) if milliseconds else 0.0
        total[f"{what}_per_token_ms"] = round(milliseconds / total[f"{what}_n"], 3) if total[f"{what}_n"] else 0.0
    if not shows_steps:
        for name in DRAFT_FIELDS:
            del total[name]
    return total


def chat_logprobs(vocabulary: Vocabulary, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def native_logprobs(vocabulary: Vocabulary, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """llama-server's `completion_probabilities`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    return [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprobs], offset: int, first: int | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `offset`: characters of the answer before the first entry; `first`: a token
    before them that nothing comes before, the first one of a prompt: null, as OpenAI gives for it.
    """
    unknown: list[None] = [] if first is None else [None]
    ids = [*([] if first is None else [first]), *(entry.token for entry in entries)]
    pieces = [vocabulary.piece(token) for token in ids]
    texts = [piece.decode("utf-8", "replace") for piece in pieces]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{vocabulary.piece(t).decode("utf-8", "replace"): p for t, p in entry.top} for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [*unknown, *(entry.logprob for entry in entries)],
        "top_logprobs": [*unknown, *tops],
        "text_offset": offsets,
    }


def origins(texts: Sequence[str], piece: Piece) -> list[dict[str, Any]]:
    """What the page shows of each token of a piece: its text and where it was drafted from."""
    found = []
    origin_of = piece.origins or (None,) * len(piece.tokens)
    for text, token, source, origin in zip(texts, piece.tokens, piece.sources, origin_of, strict=True):
        found.append(
            {
                "text": text,
                "token": token,
                "source": source,
                "file": origin.file if origin else None,
                "line": origin.line if origin else None,
                "match": origin.match if origin else None,
                "probability": origin.probability if origin else None,
            }
        )
    return found
