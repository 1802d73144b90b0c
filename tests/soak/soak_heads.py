"""10 000 short requests with all kinds of heads: no cell is left, and the memory does not grow.

Not collected by `make test`; `make soak` runs it. It takes some four minutes. REST_LOCAL_SOAK_REQUESTS is the
number of requests of all heads together, and REST_LOCAL_SOAK_SEED repeats a run.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.heads import HEADS, draft_whatever_it_costs, model_and_drafter, serve_many

from rest_local import Engine

REQUESTS = int(os.environ.get("REST_LOCAL_SOAK_REQUESTS", "10000"))
SEED = int(os.environ.get("REST_LOCAL_SOAK_SEED", str(time.time_ns() % 10**6)))
GROWTH_MB = 8.0  # Two thirds of the requests add 0.4 to 1.2 MB on Linux, for lists that grow with their number.


@pytest.mark.parametrize("kind", HEADS)
def test_many_requests(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)
    print(f"REST_LOCAL_SOAK_SEED={SEED}")
    model, drafter = model_and_drafter(kind, tmp_path)
    options: dict[str, Any] = {} if drafter is None else {"draft_model": drafter}
    with Engine.load(model, n_ctx=256, slots=4, threads=1, **options) as engine:
        figures = serve_many(engine, -(-REQUESTS // len(HEADS)), SEED)
    print(json.dumps({"head": kind, **figures}))
    assert figures["last_mb"] - figures["first_mb"] < GROWTH_MB
