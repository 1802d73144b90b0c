"""llama-server's own calls: /completion and /infill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rest_local.api.answers import Answer, HasResult, Part, RequestContext, event, timings
from rest_local.api.bodies import InfillBody, NativeBody
from rest_local.api.requests import (
    grammar_of,
    infill_tokens,
    prompt_text,
    prompts_of,
    request_of,
    sampling_settings,
)
from rest_local.decoding.request import Request

if TYPE_CHECKING:
    from rest_local.decoding.logprobs import TokenLogprobs


class NativeCompletion:
    """A `Call` that continues one or more prompts, or fills a gap."""

    def __init__(self, context: RequestContext, body: NativeBody) -> None:
        self.context, self.body = context, body
        self.made: list[Request] = []

    def requests(self) -> list[Request]:
        engine, body = self.context.engine, self.body
        if isinstance(body, InfillBody):
            extra = [(each.filename or "", each.text) for each in body.input_extra or ()]
            room = max(body.n_predict or 0, 0)
            prompts = [infill_tokens(engine, body.input_prefix, body.input_suffix, extra, body.prompt, room)]
        else:
            prompts = prompts_of(engine, body.prompt, longest=engine.n_ctx)
        grammar, logprobs = grammar_of(body), body.n_probs or None
        made = partial(request_of, engine, body, logprobs=logprobs, grammar=grammar, asks=body.prompt)
        self.made = [made(prompt) for prompt in prompts]
        return self.made

    def answer(self, answered: Sequence[HasResult]) -> NativeAnswer:
        return NativeAnswer(self, answered)


class NativeAnswer(Answer[NativeBody]):
    """The answers in llama-server's shape, one for each prompt. Only the last event of each has `stop` true."""

    def __init__(self, call: NativeCompletion, answered: Sequence[HasResult]) -> None:
        super().__init__(call.context, call.body, answered, n_indent=call.body.n_indent or 0)
        self._requests = call.made

    def advance(self, number: int, part: Part) -> list[bytes]:
        fields = self._partial(number, part)
        if part.logprobs:
            fields["completion_probabilities"] = self._probabilities(part.logprobs)
        return [event(fields | part.extension)]

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [event(self._partial(number, Part()) | fields)]

    def complete(self, number: int) -> list[bytes]:
        return [event(self._selected(self._final(number) | {"content": "", "tokens": []}))]

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        results = [self._selected(self._final(number)) for number in range(len(self.choices))]
        return results[0] if len(results) == 1 else results

    def _partial(self, number: int, part: Part) -> dict[str, Any]:
        return {
            "index": number,
            "content": part.text,
            "tokens": part.tokens,
            "stop": False,
            "tokens_predicted": len(self.choices[number].tokens),
            "tokens_evaluated": len(self._requests[number].prompt),
        }

    def _selected(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the `response_fields` that the client chose by path, such as `timings/prompt_n`.

        Unknown paths are left out. As in llama-server, only the last event is affected.
        """
        found: dict[str, Any] = {}
        for name in self.body.response_fields or ():
            value: Any = fields
            for step in name.split("/"):
                if not isinstance(value, dict) or step not in value:
                    break
                value = value[step]
            else:
                found[name] = value
        return found if self.body.response_fields else fields

    def _final(self, number: int) -> dict[str, Any]:
        result, choice, request = self.results[number], self.choices[number], self._requests[number]
        selected, limited = self.body.response_fields, choice.ended or result.finish_reason == "length"
        is_full = result.finish_reason == "length" and len(request.prompt) + len(result.tokens) >= self.engine.n_ctx
        shows_prompt = not selected or "prompt" in selected  # its text costs half a microsecond per token
        fields = {
            "index": number,
            "content": choice.text,
            "tokens": choice.tokens if self.body.return_tokens else [],
            "id_slot": result.slot if self.shows_steps else -1,
            "stop": True,
            "model": self.context.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(request.prompt),
            "generation_settings": self._generation_settings(request),
            "prompt": prompt_text(self.engine.model.vocabulary, request.prompt) if shows_prompt else "",
            "has_new_line": "\n" in choice.text,
            "truncated": is_full,
            "stop_type": "limit" if limited else "word" if result.stopping_word else "eos",
            "stopping_word": result.stopping_word,
            "tokens_cached": result.timings.cached_tokens + result.timings.prompt_tokens + len(result.tokens),
            "timings": timings([result], self.shows_steps),
        }
        if choice.logprobs and not self.body.stream:
            fields["completion_probabilities"] = self._probabilities(choice.logprobs)
        if self.sends_origins:
            fields["rest_local"] = {"draft": result.draft.to_dict()}
        return fields

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return `completion_probabilities`."""

        def one(token: int, logprob: float) -> dict[str, Any]:
            piece = self.engine.model.vocabulary.piece(token)
            shown = piece.decode("utf-8", "replace")
            return {"id": token, "token": shown, "bytes": list(piece), "logprob": logprob}

        return [
            one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]

    def _generation_settings(self, request: Request) -> dict[str, Any]:
        """Return the settings in effect. Defaults are filled in, and samplers that are off have their neutral value."""
        sampling = request.sampling
        ends = [(int(token), -math.inf) for token in self.engine.model.vocabulary.ends] if request.ignore_end else []
        limit = -1 if self.body.n_predict is None and self.body.max_tokens is None else request.max_tokens
        return sampling_settings(sampling) | {
            "n_ctx": self.engine.n_ctx,
            "n_predict": limit,
            "max_tokens": limit,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "stop": list(request.stop),
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_end,
            "n_probs": request.logprobs or 0,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in (*sampling.logit_bias, *ends)],
            "grammar": sampling.grammar.source if sampling.grammar else "",
            "stream": bool(self.body.stream),
        }
