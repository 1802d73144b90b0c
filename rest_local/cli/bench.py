"""`rest-local bench`: measure drafting. `replay` drives it with recorded answers, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli.options import json_option
from rest_local.errors import OptionError

if TYPE_CHECKING:
    from rest_local.bench.recorded import Recorded
    from rest_local.drafting.sources import Sources
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.planning.cost import CostCurve
    from rest_local.retrieval.datastore import Datastore

THRESHOLDS = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02)


@click.group()
def bench() -> None:
    """Measure drafting on recorded answers."""


@bench.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--vocab", required=True, metavar="GGUF", help="A model or vocabulary file to tokenize with.")
@click.option("-d", "--datastore", multiple=True, metavar="NAME", help="Draft from this datastore, too; repeatable.")
@click.option(
    "--history", type=click.IntRange(min=1), metavar="N", help="Test the first N answers, draft from the rest."
)
@click.option("--policy", type=click.Choice(["off", "auto"]), default="auto", show_default=True, help="With --curve.")
@click.option(
    "--curve", "curves", multiple=True, metavar="FILE", help="Cost curve to plan by, a file or a shipped name."
)
@click.option("--sweep", is_flag=True, help="Draft above several thresholds; show MAT against nodes a step.")
@json_option
def replay(
    files: tuple[Path, ...],
    vocab: str,
    datastore: tuple[str, ...],
    history: int | None,
    policy: str,
    curves: tuple[str, ...],
    sweep: bool,
    as_json: bool,
) -> None:
    """Replay recorded answers as if the model had just chosen them, and count what drafting would have given.

    Formats: OpenAI batch lines with request and response, MT-Bench answers, AlpacaEval outputs, HumanEval problems.
    Without --curve and --sweep the shipped curves are used. No model is run.
    """
    from rest_local.bench import replay as replays
    from rest_local.llama.model import Model
    from rest_local.planning.policies import make_policy

    with Model.open(vocab, vocab_only=True) as model:
        recorded = _load(files, model.vocabulary)
        make_sources, stores = _sources(recorded, datastore, history, model.vocabulary)
    tested = recorded[:history]
    report: dict[str, Any] = {"answers": len(tested), "tokens": sum(len(r.answer) for r in tested)}
    try:
        if sweep:
            report["sweep"] = replays.sweep(tested, make_sources, THRESHOLDS)
        names = curves or (() if sweep else shipped())
        report["curves"] = {
            name: replays.replay(tested, make_sources, make_policy(policy, _curve(name)), _curve(name)).to_dict()
            for name in names
        }
    finally:
        for store in stores:
            store.close()
    if not as_json:
        _print(report)
    click.echo(json.dumps(report))


def _load(files: tuple[Path, ...], vocabulary: Vocabulary) -> list[Recorded]:
    from rest_local.bench.recorded import load

    try:
        found = [answer for file in files for answer in load(file, vocabulary)]
        if not found:
            raise OptionError(f"{', '.join(map(str, files))}: holds no recorded answer")
        return found
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise OptionError(f"{', '.join(map(str, files))}: not a file of recorded answers ({error})") from error


def _sources(
    recorded: list[Recorded], names: tuple[str, ...], tested: int | None, vocabulary: Vocabulary
) -> tuple[Callable[[], Sources], list[Datastore]]:
    """What makes the sources of one replay, and the datastores to close afterwards."""
    from rest_local.drafting.sources import Sources
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.growing import GrowingText
    from rest_local.retrieval.home import datastore_path

    identity, size = vocabulary.identity, vocabulary.size
    stores = [
        Datastore.open(datastore_path(name), vocabulary_hash=identity.hash, vocabulary_name=identity.name)
        for name in names
    ]
    earlier: GrowingText | None = None
    if tested is not None:
        earlier = GrowingText()
        for answer in recorded[tested:]:
            earlier.extend([*answer.answer, -1])
    return (lambda: Sources(stores, size, earlier)), stores


def shipped() -> tuple[str, ...]:
    """Names of the curves that come with the package."""
    return tuple(sorted(path.stem for path in _curves().glob("*.json")))


def _curves() -> Path:
    return Path(__file__).resolve().parent.parent / "bench" / "curves"


def _curve(name: str) -> CostCurve:
    """Raises OptionError where neither a file nor a shipped curve of that name is one."""
    from rest_local.planning.cost import CostCurve

    path = Path(name) if Path(name).is_file() else _curves() / f"{name}.json"
    try:
        points = json.loads(path.read_text("utf-8"))
        return CostCurve.from_points(points["contexts"], points["sizes"], points["ms"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        known = ", ".join(shipped())
        raise OptionError(f"curve {name}: not a cost curve ({error}); shipped are {known}") from error


def _print(report: dict[str, Any]) -> None:
    click.echo(f"{report['answers']} answers, {report['tokens']:,} tokens")
    for row in report.get("sweep", ()):
        click.echo(f"  above {row['threshold']:<5} {row['nodes_per_step']:>6.2f} nodes a step   MAT {row['mat']:.3f}")
    for name, row in report["curves"].items():
        click.echo(
            f"  {name}: {row['speedup']:.3f} times plain, worst answer {row['worst_answer']:.2f}, "
            f"MAT {row['mat']:.3f} at {row['nodes_per_step']:.2f} nodes, {row['draft_ms']['mean']:.2f} ms to draft"
        )
