"""`rest-local tune`: measure thoroughly what this machine can do with a model, keep it, and say what pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import opening, options, terminal
from rest_local.cli.sections import SectionedCommand
from rest_local.decoding.config import EngineConfig
from rest_local.errors import RestLocalError

if TYPE_CHECKING:
    from rest_local.calibration.measuring import Measured


@click.command(cls=SectionedCommand)
@options.engine_options
@terminal.json_option
def tune(config: EngineConfig, as_json: bool) -> None:
    """Measure what batches of tokens cost with a model on this machine, and explain what pays.

    Not needed: costs are estimated at the first start and refined while the model answers. With this they are right
    from the first token on. Takes about 700 plain steps; do nothing else with the machine meanwhile.
    """
    from rest_local.calibration.measuring import explain

    opening.tell_snapshots(config)
    with opening.open_engine(config) as engine:
        try:
            with terminal.Bar() as bar:
                measured = engine.tune(lambda done, total: bar.show("measuring", done, total))
        except ValueError as error:
            raise RestLocalError(f"the costs of {engine.model.name} cannot be measured: {error}") from error
        engine.compare()
        facts = findings(measured, engine.calibration, engine.settings)
        contexts = measured.curve.contexts
    if as_json:
        return terminal.print_json(facts)
    for n_ctx in contexts:
        for line in explain(measured.curve, n_ctx):
            click.echo(line)
        click.echo()
    return click.echo(verdict(measured))


def findings(measured: Measured, calibration: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    from rest_local.calibration.measuring import advantages

    curve = measured.curve
    return {
        "final": measured.complete,
        "noise": round(measured.noise, 4),
        "busy": round(measured.busy, 4),
        "calibration": dict(calibration),
        "flash_attention": settings["flash_attention"],
        "cost_curve": curve.table(),
        "drafts": {str(n_ctx): advantages(curve, n_ctx) for n_ctx in curve.contexts},
    }


def verdict(measured: Measured) -> str:
    """Whether the figures can be trusted, and what to do where not."""
    noise = f"the rounds differ by {100 * measured.noise:.0f}%"
    if measured.complete:
        return f"These costs are final ({noise})."
    if measured.busy > 0:
        disturbed = f"other processes disturbed {100 * measured.busy:.0f}% of the batches"
        return f"These costs are provisional: {disturbed} ({noise}). Run this again when the machine does nothing else."
    return f"These costs are provisional ({noise}). They are refined while the model answers."
