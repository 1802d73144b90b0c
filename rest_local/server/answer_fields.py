"""Fields of OpenAI's and llama-server's answers: counts, times, log-probabilities, origins. Knows no HTTP."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rest_local.decoding.results import Timings, llama_timings

if TYPE_CHECKING:
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.stream import Piece, Result
    from rest_local.llama.vocabulary import Vocabulary

COARSE_MS = 100  # where steps are hidden, times are rounded to multiples of this


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(results: Sequence[Result], choices: int, predicted: bool, shows_steps: bool) -> dict[str, Any]:
    """OpenAI's `usage`.

    choices      answers to each prompt, which are neighbours in `results`
    predicted    the client sent a prediction: count how much of it was accepted
    shows_steps  count how much of the prompts was cached, which tells what other clients sent before
    """
    firsts = Timings.total(result.timings for result in results[::choices])
    cached = firsts.cached_tokens
    prompt = cached + firsts.prompt_tokens
    completion = sum(len(result.tokens) for result in results)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if shows_steps:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    if predicted:
        of_prediction = [result.draft.of_source("prediction") for result in results]
        drafted = sum(source.drafted for source in of_prediction)
        accepted = sum(source.accepted for source in of_prediction)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return counts


def timings(results: Sequence[Result], shows_steps: bool) -> dict[str, float]:
    """llama-server's `timings` over all answers.

    Without `shows_steps`, counts of drafts are left out, and so is what tells how much of the prompt was cached:
    `prompt_n` is then the whole prompt, without a time, and the time of the answer is rounded.
    """
    total = Timings.total(result.timings for result in results)
    if not shows_steps:
        rounded = COARSE_MS * round(total.predicted_ms / COARSE_MS)
        answer = llama_timings("predicted", total.predicted_tokens, rounded)
        return {"prompt_n": total.cached_tokens + total.prompt_tokens} | answer
    return total.to_dict()


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


def native_logprobs(
    vocabulary: Vocabulary, entries: Iterable[TokenLogprobs], after_sampling: bool
) -> list[dict[str, Any]]:
    """llama-server's `completion_probabilities`: logarithms, or with `after_sampling` probabilities."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        value = {"prob": math.exp(logprob)} if after_sampling else {"logprob": logprob}
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece)} | value

    top = "top_probs" if after_sampling else "top_logprobs"
    return [
        one(entry.token, entry.logprob) | {top: [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprobs], offset: int, first: int | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    offset   characters of the answer before the first entry
    first    the first token of an echoed prompt, which has no log-probability: null, as in OpenAI's answers
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
    """The text and the source of each token of a piece, for the page."""
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
