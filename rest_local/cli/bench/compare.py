"""`rest-local bench compare`: plain decoding, policies, drafters and other runtimes on the same prompts in turns."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion, inputs, interrupt, options
from rest_local.cli.bench.common import bench, data_option
from rest_local.cli.messages import fitted, say
from rest_local.cli.options import json_option
from rest_local.errors import InputInvalid

if TYPE_CHECKING:
    from rest_local.bench.comparing.choice import Choice

_threads, _gpu_layers = options.device_options(click.option)


@bench.command()
@click.option("-m", "--model", metavar="MODEL", shell_complete=completion.models, help=options.MODEL_HELP)
@click.option(
    "--workloads",
    multiple=True,
    metavar="NAME,...",
    help="completion, edit, chat, json, batch, humaneval, mt-bench, spec-bench, spec-bench/CATEGORY, replay. "
    "Default: all.",
)
@click.option(
    "-md",
    "--draft-model",
    "draft_models",
    multiple=True,
    metavar="MODEL",
    allow_from_autoenv=False,  # elsewhere it is one model, here each is one more side
    shell_complete=completion.models,
    help="A draft model, MTP layers or an EAGLE-3 head, as one more side; repeatable.",
)
@click.option(
    "--llama-server",
    metavar="PATH",
    shell_complete=completion.paths,
    help="llama.cpp's server of yours, with each of its n-gram types and the drafters. It is started and ended.",
)
@data_option
@click.option(
    "--git",
    allow_from_autoenv=False,  # `bench replay` takes several
    metavar="REPO",
    shell_complete=completion.paths,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Complete files and make the edits of this repository. Default: Python's standard library.",
)
@click.option(
    "--replay",
    "replays",
    multiple=True,
    metavar="FILE",
    shell_complete=completion.paths,
    type=click.Path(path_type=Path),
    help="Replay recorded answers, too; repeatable. Default: those in --data and --git.",
)
@click.option(
    "--replay-model",
    metavar="MODEL",
    allow_from_autoenv=False,
    shell_complete=completion.models,
    help="Pay the forward passes of replays on this model, real or synthetic. Default: the model.",
)
@_threads
@_gpu_layers
@click.option("-c", "--ctx", "n_ctx", type=click.IntRange(min=64), metavar="N", help="Leave out longer prompts.")
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens of an answer. Default: 128, quick 24.",
)
@click.option("--prompts", type=click.IntRange(min=1), metavar="N", help="Prompts of a workload. Default: 8, quick 1.")
@click.option("--quick", is_flag=True, help="A first look: less than a minute with the demo model.")
@click.option(
    "-o",
    "--out",
    default="bench-results",
    show_default=True,
    metavar="DIR",
    shell_complete=completion.paths,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the result compare.json goes. An interrupted run goes on there.",
)
@json_option
def compare(out: Path, as_json: bool, **given: Any) -> None:
    """Run the same prompts on every side in turns: plain decoding, the policies, your drafters, other runtimes.

    Speed, tokens a forward pass, acceptance, and whether the output is identical, by workload. `real`: the model writes
    the answers. `replay`: recorded answers, with the forward passes of a model paid. Interrupted, the same command goes
    on with what is missing. Measure on a quiet machine.
    """
    from rest_local.bench.comparing.measure import journal_path, measure

    choice = _choice(**given)
    try:
        result = measure(choice, out, _command(), say)
    except KeyboardInterrupt:
        if journal_path(out).exists():
            say(f"interrupted; the same command goes on with what is missing ({journal_path(out)})")
        raise click.exceptions.Exit(interrupt.EXIT_CODE) from None
    if as_json:
        click.echo(json.dumps({"kind": result.kind, "seconds": result.seconds, **result.data}))
        return
    print_report(result.data)
    _say(f"result: {out / 'compare.json'}; as a page: rest-local bench report {shlex.quote(str(out))}")


def _choice(
    model: str | None,
    workloads: tuple[str, ...],
    draft_models: tuple[str, ...],
    replays: tuple[Path, ...],
    replay_model: str | None,
    threads: int | None,
    tokens: int | None,
    prompts: int | None,
    quick: bool,
    **given: Any,
) -> Choice:
    """Raises OptionError, ModelNotFound, InputInvalid."""
    from rest_local.bench.comparing.choice import DEFAULT, QUICK, Choice, selected
    from rest_local.llama.cores import default_threads

    chosen = selected(workloads)
    for path in replays:
        if not path.is_file():
            raise InputInvalid("file", path, "no such file")
    size = QUICK if quick else DEFAULT
    if prompts is not None:
        size = replace(size, prompts=prompts, by_category=prompts, answers=prompts)
    return Choice(
        model=inputs.model_path(model),
        threads=threads or default_threads(),
        size=replace(size, tokens=tokens or size.tokens, replayed=tokens or size.replayed),
        workloads=chosen,
        draft_models=tuple(inputs.model_path(name) for name in draft_models),
        replay=replays,
        replay_model=(replay_model and inputs.model_path(replay_model)) or None,
        quick=quick,
        **given,
    )


def _command() -> str:
    """The command line for the result, without the folders of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["rest-local", *words])


def print_report(data: Mapping[str, Any]) -> None:
    """The speed-ups by workload, then what won and what lost."""
    from rest_local.bench.comparing.section import words

    for row in data["workloads"]:
        mode = f"{row['mode']}, exact" if row["settings"] == "exact" else row["mode"]
        speed = row["plain"]["tokens_per_second"]
        plain = f"; plain {speed:.1f} tokens/s" if speed else ""
        _say(f"{row['workload']} ({mode}, {row['prompts']} prompts{plain})")
        for name, side in row["sides"].items():
            _say(f"  {name}: {_figures(side)}")
    for row in data["left_out"]:
        n = f"{row['prompts']} prompts " if row.get("prompts") else ""
        _say(f"left out: {n}{row.get('workload') or row['side']}: {row['reason']}")
    for row in data["failed"]:
        _say(f"left out: {row['side']} ({row['stage']}): {row['reason']}")
    for paragraph in list(words(data))[1:]:
        _say(paragraph.replace("`", ""))


def _figures(side: Mapping[str, Any]) -> str:
    if not side["prompts"]:
        return f"left out ({side['left_out']})"
    mat = f", {side['mat']:.2f} tokens a pass" if side["mat"] else ""
    accepted = f", {side['acceptance']:.0%} accepted" if side["acceptance"] is not None else ""
    differing = f", {side['differing']} of {side['answers']} differ" if side["differing"] else ""
    return f"{side['speedup']:.3f} x plain (least {side['least']:.2f}){mat}{accepted}{differing}"


def _say(line: str) -> None:
    click.echo(fitted(line, sys.stdout))
