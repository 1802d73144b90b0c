"""Requests with heads leave nothing. The long version is tests/soak/soak_heads.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.heads import COVERING, draft_whatever_it_costs, model_and_drafter, serve_many

from rest_local import Engine


@pytest.mark.parametrize("kind", COVERING[1:])
def test_requests_leave_no_cells(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)
    model, drafter = model_and_drafter(kind, tmp_path)
    options: dict[str, Any] = {} if drafter is None else {"draft_model": drafter}
    with Engine.load(model, n_ctx=256, slots=4, threads=1, **options) as engine:
        figures = serve_many(engine, 32)
    assert figures["accepted"] > 2
    assert figures["cancelled"] > 2
