"""The tables of `rest-local bench replay`, for people; `--json` has the same figures and more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

DEPTHS = 10  # of acceptance by depth: one line


def print_report(report: Mapping[str, Any]) -> None:
    """What was measured, in the order of the report."""
    click.echo(f"{report['answers']} answers, {report['tokens']:,} tokens")
    if "wall_clock" in report:
        _print_wall(report["wall_clock"])
    for row in report.get("sweep", ()):
        click.echo(f"  above {row['threshold']:<5} {row['nodes_per_step']:>6.2f} nodes a step   MAT {row['mat']:.3f}")
    for name, row in report["curves"].items():
        _print_curve(name, row)
    for name, row in report.get("peers", {}).items():
        _print_peer(name, row)
    for name, reason in report.get("peers_left_out", {}).items():
        click.echo(f"  {name}: left out: {reason}")


def _print_curve(name: str, row: Mapping[str, Any]) -> None:
    oracle = row["oracle"]
    click.echo(
        f"  {name}: {row['speedup']:.3f} times plain ({row['speedup_with_lookups']:.3f} with the time of "
        f"{row['lookups']:,} lookups), {row['share_of_oracle']:.0%} of the oracle's "
        f"{oracle['speedup']:.3f} and {row['share_of_fair']:.0%} of the fair bound's {row['fair']['speedup']:.3f}; "
        f"worst answer {row['worst_answer']:.2f}; tokens changed {row['tokens_changed']}"
    )
    click.echo(
        f"    MAT {row['mat']:.3f} at {row['nodes_per_step']:.2f} nodes a step, "
        f"{row['draft_ms']['mean']:.2f} ms to draft (p99 {row['draft_ms']['p99']:.2f})"
    )
    for source, count in row["by_source"].items():
        click.echo(f"    {source}: {count['accepted']:,} of {count['drafted']:,} accepted ({_share(count)})")
    shares = [f"{depth}: {_share(count)}" for depth, count in list(row["by_depth"].items())[:DEPTHS]]
    if shares:
        click.echo(f"    accepted by depth  {'  '.join(shares)}")


def _share(count: Mapping[str, int]) -> str:
    return f"{count['accepted'] / count['drafted']:.0%}" if count["drafted"] else "-"


def _print_peer(name: str, row: Mapping[str, Any]) -> None:
    ours = "beyond the sweep" if row["ours"] is None else f"ours {row['ours']:.3f}"
    speedups = "".join(f"; {curve} {speedup:.3f}" for curve, speedup in row["speedup"].items())
    click.echo(f"  {name}: MAT {row['mat']:.3f} at {row['nodes_per_step']:.2f} nodes a step, there {ours}{speedups}")


def _print_wall(row: Mapping[str, Any]) -> None:
    click.echo(
        f"  wall clock on {row['model']}: {row['speedup']:.3f} times plain "
        f"({row['plain_ms_per_token']:.1f} to {row['drafted_ms_per_token']:.1f} ms a token; rounds "
        f"{', '.join(f'{value:.3f}' for value in row['rounds'])})"
    )
    click.echo(
        f"    MAT {row['mat']:.3f} at {row['nodes_per_step']:.2f} nodes a step; implied by its cost curve "
        f"{row['implied']['speedup']:.3f}, {row['implied_over_wall']:.2f} of the wall clock's"
    )
    if row["left_out"]:
        click.echo(f"    {row['left_out']} answers do not fit the model's context and were left out")
