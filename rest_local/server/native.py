"""POST /completion and /infill: llama-server's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.server.answering import Answering, Part, submitted
from rest_local.server.answers import native_logprobs, timings
from rest_local.server.bodies import InfillBody, NativeBody
from rest_local.server.grammars import grammar_of
from rest_local.server.parsing import parse
from rest_local.server.prompts import infill_tokens, native_prompts, prompt_text
from rest_local.server.requests import longest_prompt, request_of
from rest_local.server.running import event
from rest_local.server.state import state_of

_SAMPLERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
)


async def completion(request: HttpRequest) -> Response:
    """A prompt is continued, or each of several."""
    body = await parse(request, NativeBody)
    return await _answer(
        request, body, lambda engine: native_prompts(engine, body.prompt, longest_prompt(engine, body))
    )


async def infill(request: HttpRequest) -> Response:
    """A gap is filled."""
    body = await parse(request, InfillBody)
    extra = [(each.filename or "", each.text) for each in body.input_extra or ()]

    def tokens(engine: Engine) -> list[list[int]]:
        answer = max(body.n_predict or 0, 0)
        return [infill_tokens(engine, body.input_prefix, body.input_suffix, extra, body.prompt, answer)]

    return await _answer(request, body, tokens)


async def _answer(
    request: HttpRequest, body: NativeBody | InfillBody, make: Callable[[Engine], list[list[int]]]
) -> Response:
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(body.model)
    prompts: list[list[int]] = []
    requests: list[Request] = []

    def prepare() -> list[Request]:
        prompts.extend(make(engine))
        grammar = grammar_of(body)
        for prompt in prompts:
            requests.append(request_of(engine, body, prompt, logprobs=body.n_probs or None, grammar=grammar))
        return requests

    running = await submitted(request, service, prepare)
    answer = NativeAnswer(state, engine, body, running, model=model, n_indent=body.n_indent or 0)
    answer.prompts, answer.requests = prompts, requests
    return await answer.respond(request)


class NativeAnswer(Answering):
    """Answers in llama-server's shape, one to a prompt; `stop` is true in the last event of each only."""

    body: NativeBody
    prompts: list[list[int]]
    requests: list[Request]

    def advance(self, number: int, part: Part) -> list[bytes]:
        fields: dict[str, Any] = {
            "index": number,
            "content": part.text,
            "tokens": part.tokens,
            "stop": False,
            "tokens_predicted": len(self.choices[number].tokens),
            "tokens_evaluated": len(self.prompts[number]),
        }
        if part.logprobs:
            fields["completion_probabilities"] = native_logprobs(self.engine.model.vocabulary, part.logprobs)
        return [event(fields | part.told)]

    def complete(self, number: int) -> list[bytes]:
        return [event(self._wanted(self._final(number) | {"content": "", "tokens": []}))]

    def end(self) -> list[bytes]:
        return []

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        results = [self._wanted(self._final(number)) for number in range(len(self.prompts))]
        return results[0] if len(results) == 1 else results

    def _wanted(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Only of the last event of a stream, as llama-server has it: those before are the text."""
        wanted = self.body.response_fields
        return fields if not wanted else dict(_selected(fields, wanted))

    def _final(self, number: int) -> dict[str, Any]:
        result, choice, prompt = self.results[number], self.choices[number], self.prompts[number]
        fields = {
            "index": number,
            "content": choice.text,
            "tokens": choice.tokens if self.body.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(prompt),
            "generation_settings": self._generation_settings(self.requests[number]),
            "prompt": self._prompt_text(prompt),
            "has_new_line": "\n" in choice.text,
            "truncated": result.truncated,
            "stop_type": self._stop_type(number),
            "stopping_word": result.stopping_word,
            "tokens_cached": result.timings.cached_tokens + result.timings.prompt_tokens + len(result.tokens),
            "timings": timings([result], self.shows_steps),
        }
        if choice.logprobs:
            fields["completion_probabilities"] = native_logprobs(self.engine.model.vocabulary, choice.logprobs)
        if self.tells:
            fields["rest_local"] = {"draft": result.draft.to_dict()}
        return fields

    def _prompt_text(self, prompt: list[int]) -> str:
        """Empty where nobody reads it: it takes half a microsecond a token."""
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
        """What the answer was made with, whatever was sent: defaults filled in, samplers that are off at their off."""
        sampling = request.sampling
        effective: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLERS}
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
            "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias],
            "grammar": sampling.grammar.source if sampling.grammar else "",
            "stream": bool(self.body.stream),
        }


def _selected(fields: dict[str, Any], wanted: list[str]) -> list[tuple[str, Any]]:
    """`timings/prompt_n` is a key of its own, with the value it leads to; what leads nowhere is left out."""
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
