"""POST /completion and /infill: llama-server's own calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.request import Request
from rest_local.server.answer_fields import native_logprobs, timings
from rest_local.server.answering import Answer, Answered, Asked, Generating, Part
from rest_local.server.bodies import InfillBody, NativeBody, parse
from rest_local.server.prompts import infill_tokens, prompt_text, prompts_of
from rest_local.server.requests import grammar_of, longest_prompt, request_of
from rest_local.server.streaming import event

_SAMPLERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
)


async def completion(request: HttpRequest) -> Response:
    """Continues a prompt, or each of several."""
    body = await parse(request, NativeBody)
    return await _answer(
        request, body, lambda engine: prompts_of(engine, body.prompt, longest=longest_prompt(engine, body))
    )


async def infill(request: HttpRequest) -> Response:
    """Fills a gap."""
    body = await parse(request, InfillBody)
    extra = [(each.filename or "", each.text) for each in body.input_extra or ()]

    def tokens(engine: Engine) -> list[list[int]]:
        answer = max(body.n_predict or 0, 0)
        return [infill_tokens(engine, body.input_prefix, body.input_suffix, extra, body.prompt, answer)]

    return await _answer(request, body, tokens)


async def _answer(request: HttpRequest, body: NativeBody, make: Callable[[Engine], list[list[int]]]) -> Response:
    asked = Generating.of(request, body)
    requests: list[Request] = []

    def prepare() -> list[Request]:
        prompts, grammar = make(asked.engine), grammar_of(body)
        for prompt in prompts:
            requests.append(request_of(asked.engine, body, prompt, logprobs=body.n_probs or None, grammar=grammar))
        return requests

    streams = await asked.submit(request, prepare)
    return await NativeAnswer(asked, streams.streams, requests).respond(request, streams)


class NativeAnswer(Answer[NativeBody]):
    """Answers in llama-server's shape, one to a prompt; `stop` is true in the last event of each only."""

    def __init__(self, asked: Asked[NativeBody], answered: Sequence[Answered], requests: Sequence[Request]) -> None:
        super().__init__(asked, answered, n_indent=asked.body.n_indent or 0)
        self._requests = requests

    def advance(self, number: int, part: Part) -> list[bytes]:
        fields = self._partial(number, part)
        if part.logprobs:
            fields["completion_probabilities"] = self._probabilities(part.logprobs)
        return [event(fields | part.extension)]

    def _partial(self, number: int, part: Part) -> dict[str, Any]:
        return {
            "index": number,
            "content": part.text,
            "tokens": part.tokens,
            "stop": False,
            "tokens_predicted": len(self.choices[number].tokens),
            "tokens_evaluated": len(self._requests[number].prompt),
        }

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [event(self._partial(number, Part()) | fields)]

    def complete(self, number: int) -> list[bytes]:
        return [event(self._selected(self._final(number) | {"content": "", "tokens": []}))]

    def end(self) -> list[bytes]:
        return []

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        results = [self._selected(self._final(number)) for number in range(len(self.choices))]
        return results[0] if len(results) == 1 else results

    def _selected(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The `response_fields` that the client chose. As in llama-server, they affect only the last event."""
        wanted = self.body.response_fields
        return fields if not wanted else dict(_selected(fields, wanted))

    def _final(self, number: int) -> dict[str, Any]:
        result, choice, request = self.results[number], self.choices[number], self._requests[number]
        fields = {
            "index": number,
            "content": choice.text,
            "tokens": choice.tokens if self.body.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self.asked.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(request.prompt),
            "generation_settings": self._generation_settings(request),
            "prompt": self._prompt_text(request.prompt),
            "has_new_line": "\n" in choice.text,
            "truncated": result.truncated,
            "stop_type": self._stop_type(number),
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
        return native_logprobs(self.engine.model.vocabulary, entries, bool(self.body.post_sampling_probs))

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        """Empty if the client did not select it: it costs half a microsecond a token."""
        wanted = self.body.response_fields
        if wanted and "prompt" not in wanted:
            return ""
        return prompt_text(self.engine.model.vocabulary, prompt)

    def _stop_type(self, number: int) -> str:
        result = self.results[number]
        if self.choices[number].ended or result.finish_reason == "length":
            return "limit"
        return "word" if result.stopping_word else "eos"

    def _generation_settings(self, request: Request) -> dict[str, Any]:
        """The settings in effect: defaults filled in, samplers that are off with their neutral value."""
        sampling = request.sampling
        effective: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLERS}
        ends = [(int(token), -math.inf) for token in self.engine.model.vocabulary.ends] if request.ignore_end else []
        limit = -1 if self.body.n_predict is None and self.body.max_tokens is None else request.max_tokens
        return effective | {
            "n_ctx": self.engine.n_ctx,
            "n_predict": limit,
            "max_tokens": limit,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "stop": list(request.stop),
            "n_keep": request.keep_tokens,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_end,
            "n_probs": request.logprobs or 0,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in (*sampling.logit_bias, *ends)],
            "grammar": sampling.grammar.source if sampling.grammar else "",
            "stream": bool(self.body.stream),
        }


def _selected(fields: dict[str, Any], wanted: list[str]) -> list[tuple[str, Any]]:
    """Fields by path: `timings/prompt_n` becomes a key with the value at that path. Unknown paths are left out."""
    found: list[tuple[str, Any]] = []
    for name in wanted:
        value: Any = fields
        for step in name.split("/"):
            if not isinstance(value, dict) or step not in value:
                break
            value = value[step]
        else:
            found.append((name, value))
    return found
