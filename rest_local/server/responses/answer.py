"""The response that grows: OpenAI's object, or its typed events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rest_local.chat.tools import AnswerParser
from rest_local.decoding.results import Timings
from rest_local.server.answer_fields import chat_logprobs, timings
from rest_local.server.answering import Answer, Answered, Asked, Part
from rest_local.server.bodies import ChatBody
from rest_local.server.errors import ApiError, responses_error
from rest_local.server.responses.store import Kept
from rest_local.server.responses.turn import Turn
from rest_local.server.responses.writing import Event, Logprobs, Writer
from rest_local.server.streaming import event


class ResponseAnswer(Answer[ChatBody]):
    """One response. `keep`: keeps it for later requests; returns whether that could be done."""

    def __init__(
        self,
        asked: Asked[ChatBody],
        answered: Sequence[Answered],
        parser: AnswerParser,
        turn: Turn,
        keep: Callable[[Kept], bool],
    ) -> None:
        super().__init__(asked, answered)
        self._parser, self._turn, self._keep = parser, turn, keep
        self._writer = Writer(turn.id, turn.toolbox, sealed=turn.body.includes_reasoning)

    def begin(self) -> list[bytes]:
        response = self._turn.response(self.asked.model, "in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._sent(self._writer.numbered(*({"type": kind, "response": response} for kind in kinds)))

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        response = self._turn.response(self.asked.model, "in_progress")
        return self._sent(self._writer.numbered({"type": "response.in_progress", "response": response} | fields))

    def advance(self, number: int, part: Part) -> list[bytes]:
        events = self._writer.add(self._parser.feed(part.text), self._logprobs(part))
        if events:
            events[-1] |= part.extension
        return self._sent(events)

    def complete(self, number: int) -> list[bytes]:
        return self._sent(self._close())

    def end(self) -> list[bytes]:
        response = self._final()
        last = {"type": f"response.{response['status']}", "response": response, "timings": response["timings"]}
        return self._sent(self._writer.numbered(last))

    def whole(self) -> dict[str, Any]:
        choice = self.choices[0]
        self._writer.add(self._parser.feed(choice.text), self._logprobs(choice))
        self._close()
        return self._final()

    def error_event(self, error: ApiError) -> bytes:
        """`error` and `response.failed`."""
        failed = self._turn.response(
            self.asked.model,
            "failed",
            self._writer.output,
            stored=False,
            error={"code": "server_error", "message": error.message},
        )
        events = self._writer.numbered(responses_error(error), {"type": "response.failed", "response": failed})
        return b"".join(self._sent(events))

    def _close(self) -> list[Event]:
        cut = self._cut
        return [*self._writer.add(self._parser.finish(cut=cut)), *self._writer.close(cut=cut)]

    @property
    def _cut(self) -> bool:
        return self.finish_reason(0) == "length"

    def _final(self) -> dict[str, Any]:
        """The response, which is kept before the client hears of it."""
        told: dict[str, Any] = {"usage": self._usage(), "timings": timings(self.results, self.shows_steps)}
        if self._cut:
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            told["completed_at"] = int(time.time())
        status = "incomplete" if self._cut else "completed"
        response = self._turn.response(self.asked.model, status, self._writer.items, **told)
        if self._turn.stores and not self._keep(self._turn.kept(response)):
            response["store"] = False
        return response

    def _usage(self) -> dict[str, Any]:
        """Counts. Clients read the details without a check, so what other machines may not see is 0."""
        total = Timings.total(result.timings for result in self.results)
        prompt = total.cached_tokens + total.prompt_tokens
        generated = sum(len(result.tokens) for result in self.results)
        thought = len(self.engine.model.vocabulary.tokenize(self._writer.reasoning)) if self._writer.reasoning else 0
        of_answer = {"reasoning_tokens": min(thought, generated)}
        if self.shows_steps:
            predicted = [result.draft.of_source("prediction") for result in self.results]
            drafted, accepted = sum(each.drafted for each in predicted), sum(each.accepted for each in predicted)
            of_answer |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": total.cached_tokens if self.shows_steps else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": generated,
            "output_tokens_details": of_answer,
            "total_tokens": prompt + generated,
        }

    def _logprobs(self, part: Any) -> Logprobs:
        if not self._turn.body.includes_logprobs or not part.logprobs:
            return []
        entries: Logprobs = chat_logprobs(self.engine.model.vocabulary, part.logprobs)["content"]
        return entries

    def _sent(self, events: Sequence[Event]) -> list[bytes]:
        return [event(each, each["type"]) for each in events]
