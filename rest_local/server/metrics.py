"""GET /metrics: the engine's totals under llama-server's names, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.server.errors import ApiError
from rest_local.server.state import state_of

if TYPE_CHECKING:
    from rest_local.decoding.service import Service

_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens evaluated."),
    "prompt_seconds": (
        "prompt_seconds",
        "Time to evaluate prompts; a pass shared by several requests is divided by tokens.",
    ),
    "tokens_predicted": ("predicted_tokens", "Tokens generated."),
    "tokens_predicted_seconds": ("predicted_seconds", "Time to generate tokens, divided likewise."),
    "n_decode": ("steps", "Calls of llama_decode that generated tokens."),
    "spec_decode_num_drafts": ("drafts", "Drafts submitted."),
    "spec_decode_num_draft_tokens": ("drafted", "Drafted tokens submitted."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafted tokens that the model accepted."),
    "spec_decode_num_lookups": ("lookups", "Steps with a lookup of draft tokens."),
    "spec_decode_num_lookups_skipped": ("lookups_skipped", "Steps in which the policy skipped the lookup."),
}
_OF_STEPS = (
    "spec_decode_num_lookups", "spec_decode_num_lookups_skipped",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "n_decode",
)  # fmt: skip
_OF_PROMPTS = ("prompt_tokens", "prompt_seconds")  # they do not count cached tokens, and so reveal them
_GAUGES = {
    "requests_processing": ("running", "Requests that are running."),
    "requests_deferred": ("waiting", "Requests that wait for a slot."),
}


class EngineTotals(Collector):
    """Collects the service's totals. `shows_steps`: counts of drafts too."""

    def __init__(self, statistics: dict[str, Any], shows_steps: bool) -> None:
        self._statistics, self._shows_steps = statistics, shows_steps

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        found = self._statistics
        for name, (key, text) in _COUNTERS.items():
            if self._shows_steps or name not in (*_OF_STEPS, *_OF_PROMPTS):
                yield CounterMetricFamily(f"llamacpp:{name}", text, value=found[key])
        for name, (key, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=found[key])
        if self._shows_steps:
            yield GaugeMetricFamily("llamacpp:kv_cache_tokens", "KV cache cells in use.", value=found["cells_used"])
        rates = {"prompt_tokens_seconds": ("prompt_tokens", "prompt_seconds")} if self._shows_steps else {}
        rates["predicted_tokens_seconds"] = ("predicted_tokens", "predicted_seconds")
        for name, (count, seconds) in rates.items():
            rate = found[count] / found[seconds] if found[seconds] else 0.0
            yield GaugeMetricFamily(f"llamacpp:{name}", "Tokens per second over all requests so far.", value=rate)


def exposition(service: Service, shows_steps: bool) -> bytes:
    """The metrics as text."""
    registry = CollectorRegistry(auto_describe=False)
    cells = sum(slot["n_past"] for slot in service.slots())
    registry.register(EngineTotals(service.statistics() | {"cells_used": cells}, shows_steps))
    return generate_latest(registry)


async def metrics(request: HttpRequest) -> Response:
    """The metrics, if the server was started with --metrics."""
    state = state_of(request)
    if not state.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    service, _ = state.loaded()
    text = await anyio.to_thread.run_sync(exposition, service, state.settings.shows_steps)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
