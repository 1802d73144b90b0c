"""`rest-local bench datastore-size`: how large a datastore should be."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion, inputs
from rest_local.cli.bench.common import bench
from rest_local.cli.messages import fitted
from rest_local.cli.options import json_option
from rest_local.errors import CorpusEmpty, OptionError

if TYPE_CHECKING:
    from rest_local.bench.recorded import Recorded
    from rest_local.bench.sizes import Corpus, Point
    from rest_local.llama.vocabulary import Vocabulary


@bench.command(name="datastore-size")
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-d",
    "--datastore",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.datastores,
    help="Take the documents of this datastore; repeatable.",
)
@click.option(
    "--text",
    "paths",
    multiple=True,
    metavar="PATH",
    shell_complete=completion.paths,
    help="Take the text files below PATH; repeatable.",
)
@click.option(
    "--history",
    type=click.IntRange(min=1),
    metavar="N",
    allow_from_autoenv=False,
    help="Test the first N answers, and take the others as documents.",
)
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=completion.models, help="A model or vocabulary file to tokenize."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Test at most N answers. Default: all.")
@click.option("--draws", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Random subsets.")
@click.option(
    "--prune",
    "targets",
    multiple=True,
    metavar="seen:N|SIZE",
    allow_from_autoenv=False,
    help="Measure these pruned variants, not the usual ones; repeatable.",
)
@click.option(
    "--curve",
    "curves",
    multiple=True,
    metavar="FILE",
    shell_complete=completion.paths,
    help="Cost curve to plan by, a file or a shipped name; repeatable.",
)
@click.option("--plot", "picture", metavar="FILE", type=click.Path(path_type=Path), help="Write a plot, as SVG.")
@json_option
def datastore_size(
    files: tuple[Path, ...],
    datastore: tuple[str, ...],
    paths: tuple[str, ...],
    history: int | None,
    model: str | None,
    limit: int | None,
    draws: int,
    targets: tuple[str, ...],
    curves: tuple[str, ...],
    picture: Path | None,
    as_json: bool,
) -> None:
    """Measure speed-up and lookup time against the size of a datastore, by replay of recorded answers.

    Random subsets of the documents, from 1/64 to all of them, and pruned variants are the datastore, one after another.
    No model runs, and nothing is written. The files are those of `bench replay`.
    """
    from rest_local.bench.sizes import CURVES, measure
    from rest_local.calibration.curves import load_curve
    from rest_local.llama.model import Model
    from rest_local.retrieval.changing.pruning import Target

    wanted = [Target.parse(text) for text in targets] or None
    for name in curves:
        load_curve(name)
    with Model.open(inputs.model_path(model), vocab_only=True) as opened:
        corpus, tested = _inputs(files, datastore, paths, history, opened.vocabulary)
    report = measure(
        corpus,
        tested[:limit],
        curves=curves or CURVES,
        draws=draws,
        targets=wanted,
        done=_nothing if as_json else _print_point,
    )
    if picture is not None:
        from rest_local.bench.size_plot import plot

        picture.write_text(plot(report), "utf-8")
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_summary(report)


def _inputs(
    files: Sequence[Path],
    datastores: Sequence[str],
    paths: Sequence[str],
    history: int | None,
    vocabulary: Vocabulary,
) -> tuple[Corpus, list[Recorded]]:
    """The documents and the answers under test."""
    import numpy as np

    from rest_local.bench.recorded import load
    from rest_local.bench.sizes import Corpus

    tested = [answer for path in files for answer in load(path, vocabulary)]
    if not tested:
        raise OptionError("nothing to replay: name a file of recorded answers")
    documents = [np.asarray(tokens) for tokens in _documents(datastores, paths, vocabulary)]
    if history is not None:
        if history >= len(tested):
            raise OptionError(f"--history {history}: there are {len(tested)} answers; test 1 to {len(tested) - 1}")
        documents += [np.array(answer.answer, np.int32) for answer in tested[history:]]
        tested = tested[:history]
    documents = [tokens for tokens in documents if len(tokens)]
    if not documents and not (datastores or paths):
        raise OptionError("no documents: give --datastore NAME, --text PATH or --history N")
    if not documents:
        raise CorpusEmpty(", ".join((*datastores, *paths)), "no tokens")
    return Corpus(documents, vocabulary.size), tested


def _documents(datastores: Sequence[str], paths: Sequence[str], vocabulary: Vocabulary) -> Iterable[Any]:
    from rest_local.retrieval import tokenize_documents
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.home import datastore_path
    from rest_local.retrieval.sources.corpus import walk

    identity = vocabulary.identity
    for name in datastores:
        path = datastore_path(name)
        with Datastore.open(path, vocabulary_hash=identity.hash, vocabulary_name=identity.name) as store:
            for index in range(len(store.segments)):
                yield from (document.tokens for document in store.documents(index))
    if paths:
        for _, tokens, *_ in tokenize_documents(walk(paths), vocabulary.tokenize):
            yield tokens


def _nothing(point: Point) -> None:
    pass


def _print_point(point: Point) -> None:
    row = point.to_dict()
    speedups = "   ".join(
        f"{value['mean']:.4f} ({value['least']:.4f} to {value['greatest']:.4f})" for value in row["speedup"].values()
    )
    head = f"{row['label']:<18} {row['tokens']:>13,} tokens {in_bytes(row['bytes']):>8}"
    click.echo(fitted(f"{head}   {row['mat']['mean']:.3f} tokens a pass   {speedups}", sys.stdout))


def _print_summary(report: dict[str, Any]) -> None:
    rows = [*report["points"][1:], *report["pruned"]]
    lookups = ", ".join(f"{row['label']} {row['lookup_us']:g}" for row in rows)
    click.echo(fitted(f"lookup, median CPU time in us: {lookups}", sys.stdout))
    for name in report["curves"]:
        found = report["enough"][name]
        if found is None:
            click.echo(fitted(f"{name}: no size gains anything", sys.stdout))
            continue
        slopes = " ".join(f"{row['slope']:+.4f}" for row in report["slopes"][name])
        click.echo(
            fitted(
                f"{name}: {found['tokens']:,} tokens ({found['share']:.3g} of all) give {found['gain']:.0%} of the "
                f"gain; speed-up by doubling: {slopes}",
                sys.stdout,
            )
        )
