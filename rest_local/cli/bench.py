"""`rest-local bench`: measure what drafting would gain on recorded answers.

The tables are for people. `--json` has the same figures and more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion, inputs
from rest_local.cli.sections import SummaryGroup, option
from rest_local.cli.terminal import fitted, json_option, print_json
from rest_local.decoding.config import POLICY_NAMES
from rest_local.errors import ModelInvalid, OptionError

if TYPE_CHECKING:
    from rest_local.calibration.cost import CostCurve


@click.group(cls=SummaryGroup)
def bench() -> None:
    """Measure drafting on recorded answers."""


HERE = "this machine"
EDITS = 100
DEPTHS = 10  # So many fit into one line.


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    wall, here = report.get("wall_clock"), report.get("here")
    if wall:
        yield f"on this machine, with {wall['model']}: {wall['speedup']:.1f} x plain, measured"
    elif here:
        row = report["curves"][HERE]
        estimated = f"; costs are an estimate, `rest-local tune -m {here['name']}` measures"
        yield (
            f"on this machine, with {here['name']}: {row['speedup_with_lookups']:.1f} x plain, the worst answer "
            f"{row['worst_answer']:.1f}{'' if here['state'] == 'final' else estimated}"
        )
    yield f"{report['answers']} answers, {report['tokens']:,} tokens"
    if wall:
        rounds = ", ".join(f"{value:.3f}" for value in wall["rounds"])
        yield f"  wall clock on {wall['model']}: {wall['speedup']:.3f} times plain decoding (rounds {rounds})"
        yield f"    {wall['plain_ms_per_token']:.1f} to {wall['drafted_ms_per_token']:.1f} ms a token"
        yield f"    {wall['mat']:.3f} tokens a pass with {wall['nodes_per_step']:.2f} nodes"
        implied = f"{wall['implied']['speedup']:.3f}, {wall['implied_over_wall']:.2f} of the wall clock's"
        yield f"    implied by its cost curve: {implied}"
        if wall["left_out"]:
            yield f"    {wall['left_out']} answers do not fit the model's context and were left out"
    for name, row in report["curves"].items():
        lookups = f"{row['speedup_with_lookups']:.3f} with the time of {row['lookups']:,} lookups"
        yield f"  {name}: {row['speedup']:.3f} times plain decoding; {lookups}; worst answer {row['worst_answer']:.2f}"
        yield f"    tokens changed: {row['tokens_changed']}"
        took = f"{row['draft_ms']['mean']:.2f} ms to draft them (p99 {row['draft_ms']['p99']:.2f})"
        yield f"    {row['mat']:.3f} tokens a pass with {row['nodes_per_step']:.2f} nodes; {took}"
        for source, count in row["by_source"].items():
            yield f"    {source}: {count['accepted']:,} of {count['drafted']:,} accepted ({_share(count)})"
        if shares := [f"{depth}:{_share(count)}" for depth, count in list(row["by_depth"].items())[:DEPTHS]]:
            yield f"    accepted by depth  {'  '.join(shares)}"


def _share(count: Mapping[str, int]) -> str:
    return f"{count['accepted'] / count['drafted']:.0%}" if count["drafted"] else "-"


# The default of --limit with -m, because a plain token takes tens of milliseconds.
WALL_ANSWERS = 4


@bench.command()
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path(path_type=Path))
@option("--vocab GGUF", "A model or vocabulary file to tokenize with. Default: the model of --model.")
@option(
    "--git REPO",
    "Replay the edits in the history of this local repository; repeatable.",
    to="repositories",
    multiple=True,
    type=click.Path(path_type=Path),
)
@option("--edits N", "Replay N edits of a repository.", default=EDITS)
@option("--predict", "With --git: also give the old file as the request's prediction.")
@option(
    "-d --datastore NAME",
    "Draft from this datastore as well; repeatable.",
    to="datastores",
    multiple=True,
    shell_complete=completion.datastores,
)
@option(
    "--history N|FILE",
    "Test the first N answers and draft from the rest, or draft from the answers of FILE.",
    shell_complete=completion.paths,
    configurable=False,  # REST_LOCAL_HISTORY=0 means --no-history.
)
@option("--limit N", f"Test at most N answers. Default: all; {WALL_ANSWERS} with --model.")
@option("--policy", "Policy that decides what is drafted.", type=click.Choice(POLICY_NAMES), default="auto")
@option(
    "--curve FILE",
    "Cost curve to plan by, a file or a shipped name; repeatable.",
    to="curves",
    multiple=True,
    shell_complete=completion.paths,
    type=str,
)
@option("--curves", "Also plan by the shipped curves of other machines.", to="all_curves")
@option(
    "-m --model MODEL",
    "Run the forward passes of this model, real or synthetic, and measure wall-clock time.",
    configurable=False,  # In other commands it only chooses a model. Here it starts minutes of decoding.
)
@option("--save-curve FILE", "With --model: write the cost curve measured on it, for --curve.")
@json_option
def replay(as_json: bool, **options: Any) -> None:
    """Replay recorded answers as if the model had just chosen them, and count what drafting would have gained.

    It reads OpenAI batch lines with request and response, MT-Bench answers, AlpacaEval outputs and HumanEval problems.
    The costs are those of the model on this machine, which --vocab names. With --model, its forward passes are really
    run. With --curve or --curves, they cost what they cost on other machines.
    """
    for name in ("model", "vocab"):
        options[name] = options[name] and str(inputs.model_path(options[name]))
    report = _report(**options)
    if not as_json:
        for line in _lines(report):
            click.echo(fitted(line, sys.stdout))
    if as_json or not sys.stdout.isatty():
        print_json(report)


def _report(
    *,
    vocab: str | None,
    model: str | None,
    policy: str,
    curves: tuple[str, ...],
    all_curves: bool,
    save_curve: Path | None,
    limit: int | None,
    **given: Any,
) -> dict[str, Any]:
    """Check the options, then measure, so that a mistake shows at once. `given` is for `open_workload`."""
    from rest_local.bench.replay import compare_curves
    from rest_local.bench.wall import wall_clock
    from rest_local.bench.workload import open_workload
    from rest_local.calibration.curves import curve_file, load_curve, shipped
    from rest_local.llama.model import Model
    from rest_local.planning.policies import make_policy as policy_of

    make_policy = partial(policy_of, policy)
    planned = {name: load_curve(name) for name in curves or (shipped() if all_curves else ())}
    tokenizer = vocab or model
    if tokenizer is None:
        raise OptionError("give --vocab GGUF or --model MODEL to tokenize the answers")
    if save_curve and not model:
        raise OptionError("--save-curve needs --model: the curve is measured on it")
    given["limit"], here = limit or (WALL_ANSWERS if model else None), None
    with Model.open(tokenizer, vocab_only=True) as opened, open_workload(opened.vocabulary, **given) as workload:
        if vocab and not (curves or model):
            curve, here = _here(vocab, required=not planned)
            planned = {HERE: curve, **planned} if curve else planned
        report: dict[str, Any] = {"answers": len(workload.tested), "tokens": workload.tokens, "here": here}
        if model:
            learned, wall = wall_clock(model, workload.tested, workload.sources, make_policy)
            report["wall_clock"] = wall
            if save_curve:
                save_curve.write_text(curve_file(learned, f"measured: {wall['model']}"), "utf-8")
        report["curves"] = compare_curves(workload, make_policy, planned)
    return report


def _here(path: str, required: bool) -> tuple[CostCurve | None, dict[str, Any] | None]:
    """Return the cost curve of a model on this machine, known or estimated from a few steps, and a description of it.

    A file without weights has none. Raises OptionError for it if a curve is `required`.
    """
    from rest_local.decoding.engine import Engine

    try:
        with Engine.load(path, history=False) as engine:
            tuning = engine.decoder.context.tuning
            return tuning.curve.copy(), {"name": engine.model.path.name, **tuning.state()}
    except ModelInvalid as error:
        if not required:
            return None, None
        raise OptionError(f"{error}; --curves replays with the costs of other machines") from error
