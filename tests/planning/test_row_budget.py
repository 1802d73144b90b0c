"""The budget of rows of logits is one for all requests."""

from __future__ import annotations

from support.fake_sequences import Silent
from support.prices import FLAT

from rest_local.drafting.recycled import SuccessorTable
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext


def test_requests_share_the_budget_and_a_step_without_time_for_a_row_reads_none() -> None:
    auto = Auto(FLAT)
    auto.successors = SuccessorTable(10)
    one, other = auto.fork(), auto.fork()
    assert one.successors is other.successors
    assert one.row_budget is other.row_budget
    one.draft(Silent(), StepContext(10, 4, 4))
    assert auto.row_budget.credit > 0
    auto.successors.row_ms = auto.row_budget.credit * 1.01
    assert one.logits_ms == 0
    auto.successors.row_ms = auto.row_budget.credit * 0.99
    assert one.logits_ms == other.logits_ms == auto.row_budget.credit
    auto.successors = None
    assert auto.logits_ms == 0
