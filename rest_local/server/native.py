"""POST /completion and /infill: llama-server's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.engine import Engine
from rest_local.server.answering import Answering, Part, submitted
from rest_local.server.answers import native_logprobs, timings
from rest_local.server.bodies import InfillBody, NativeBody
from rest_local.server.grammars import grammar_of
from rest_local.server.parsing import parse
from rest_local.server.prompts import infill_tokens, mixed_prompt, prompt_text
from rest_local.server.requests import request_of
from rest_local.server.running import event
from rest_local.server.state import state_of


async def completion(request: HttpRequest) -> Response:
    """A prompt is continued."""
    body = await parse(request, NativeBody)
    return await _answer(request, body, lambda engine: mixed_prompt(engine, body.prompt))


async def infill(request: HttpRequest) -> Response:
    """A gap is filled."""
    body = await parse(request, InfillBody)
    extra = [(each.filename or "", each.text) for each in body.input_extra or ()]

    def tokens(engine: Engine) -> list[int]:
        answer = max(body.n_predict or 0, 0)
        return infill_tokens(engine, body.input_prefix, body.input_suffix, extra, body.prompt, answer)

    return await _answer(request, body, tokens)


async def _answer(request: HttpRequest, body: NativeBody | InfillBody, make: Callable[[Engine], list[int]]) -> Response:
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(body.model)
    prompt: list[int] = []

    def prepare() -> list[Any]:
        prompt.extend(make(engine))
        return [request_of(engine, body, prompt, logprobs=body.n_probs or None, grammar=grammar_of(body))]

    running = await submitted(service, prepare)
    answer = NativeAnswer(state, engine, body, running, model=model, n_indent=body.n_indent or 0)
    answer.prompt = prompt
    return await answer.respond(request)


class NativeAnswer(Answering):
    """One answer in llama-server's shape; `stop` is true in its last event only."""

    body: NativeBody
    prompt: list[int]

    def advance(self, number: int, part: Part) -> list[bytes]:
        fields: dict[str, Any] = {
            "index": number,
            "content": part.text,
            "tokens": part.tokens,
            "stop": False,
            "tokens_predicted": len(self.choices[number].tokens),
            "tokens_evaluated": len(self.prompt),
        }
        if part.logprobs:
            fields["completion_probabilities"] = native_logprobs(self.engine.model.vocabulary, part.logprobs)
        return [event(fields | part.told)]

    def complete(self, number: int) -> list[bytes]:
        return []

    def end(self) -> list[bytes]:
        return [event(self._wanted(self._final() | {"content": "", "tokens": []}))]

    def whole(self) -> dict[str, Any]:
        return self._wanted(self._final())

    def _wanted(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Only of the last event of a stream, as llama-server has it: those before are the text."""
        wanted = self.body.response_fields
        return fields if not wanted else dict(_selected(fields, wanted))

    def _final(self) -> dict[str, Any]:
        result, choice = self.results[0], self.choices[0]
        fields = {
            "index": 0,
            "content": choice.text,
            "tokens": choice.tokens if self.body.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(self.prompt),
            "generation_settings": self._generation_settings(),
            "prompt": self._prompt_text(),
            "has_new_line": "\n" in choice.text,
            "truncated": result.truncated,
            "stop_type": self._stop_type(),
            "stopping_word": result.stopping_word,
            "tokens_cached": result.timings["cache_n"] + result.timings["prompt_n"] + len(result.tokens),
            "timings": timings(self.results, self.shows_steps),
        }
        if choice.logprobs:
            fields["completion_probabilities"] = native_logprobs(self.engine.model.vocabulary, choice.logprobs)
        if self.tells:
            fields["rest_local"] = {"draft": result.draft}
        return fields

    def _prompt_text(self) -> str:
        """Empty where nobody reads it: it takes half a microsecond a token."""
        wanted = self.body.response_fields
        if wanted and "prompt" not in wanted:
            return ""
        return prompt_text(self.engine.model.vocabulary, self.prompt)

    def _stop_type(self) -> str:
        result = self.results[0]
        if self.choices[0].ended or result.finish_reason == "length":
            return "limit"
        return "word" if result.stopping_word else "eos"

    def _generation_settings(self) -> dict[str, Any]:
        given = self.body.model_dump(exclude_none=True, exclude={"prompt", "grammar", "json_schema"})
        for name in ("input_prefix", "input_suffix", "input_extra", "model", "stream", "response_fields", "prediction"):
            given.pop(name, None)
        return {"n_predict": -1, "n_ctx": self.engine.n_ctx} | given


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
