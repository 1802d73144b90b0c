"""`rest-local batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import inputs, interrupt, opening, options, terminal
from rest_local.cli.sections import SectionedCommand
from rest_local.cli.terminal import without_messages_of_ray
from rest_local.decoding.config import EngineConfig
from rest_local.errors import OptionError, RestLocalError

if TYPE_CHECKING:
    from rest_local.batch.cluster import Cluster
    from rest_local.batch.jobs import Job, Shard
    from rest_local.batch.output import Summary
    from rest_local.batch.worker import JobAnswer

STANDARD = Path("-")
Command = Callable[..., None]


def _parse_shard(ctx: click.Context, param: click.Parameter, value: str | None) -> Shard | None:
    if value is None:
        return None
    from rest_local.batch.jobs import Shard

    return Shard.parse(value)


def _cluster_options(command: Command) -> Command:
    """`--ray` and what a replica gets, as the argument `cluster`."""

    @click.option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: `auto` for the one that this machine is a node of, host:port, or `local` for "
        "replicas on this machine, such as one for each GPU. Needs rest-local[ray].",
    )
    @click.option(
        "--replicas",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --ray: N replicas of the model. Default: as many as the nodes have room for.",
    )
    @click.option(
        "--replica-cpus",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --ray: N CPUs for a replica. Default: -t; without it 1 with a GPU, else those of the smallest node.",
    )
    @click.option(
        "--replica-gpus",
        type=click.FloatRange(min=0),
        metavar="X",
        help="With --ray: X GPUs for a replica, also a part of one. Default: 1 where the cluster has GPUs.",
    )
    @functools.wraps(command)
    def gathered(
        *args: Any,
        ray: str | None,
        replicas: int | None,
        replica_cpus: int | None,
        replica_gpus: float | None,
        **values: Any,
    ) -> None:
        cluster = None
        if ray is not None:
            from rest_local.batch.cluster import Cluster

            cluster = Cluster(ray, replicas, replica_cpus, replica_gpus)
        elif (replicas, replica_cpus, replica_gpus) != (None, None, None):
            raise click.UsageError("--replicas, --replica-cpus and --replica-gpus need --ray")
        command(*args, cluster=cluster, **values)

    return gathered


@click.command(cls=SectionedCommand)
@click.argument("requests", metavar="INPUT", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=STANDARD,
    metavar="FILE",
    allow_from_autoenv=False,
    help="Where the answers go; a name that ends in .gz: compressed. Default: the standard output.",
)
@click.option(
    "--replace",
    is_flag=True,
    allow_from_autoenv=False,
    help="Write FILE anew; else a run goes on after the answers that FILE has already.",
)
@click.option(
    "--shard",
    callback=_parse_shard,
    metavar="I/N",
    help="Only every N-th request, from the I-th on: for N jobs that share the work, each with its own FILE.",
)
@click.option(
    "-n",
    "--tokens",
    "--n-predict",
    "--predict",
    type=click.IntRange(min=0),
    metavar="N",
    help="Generate at most N tokens for a request that names no limit. Default: as many as the context holds.",
)
@options.engine_options
@options.history_option
@_cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON; needs -o.")
def batch(
    requests: Path,
    output: Path,
    replace: bool,
    shard: Shard | None,
    tokens: int | None,
    config: EngineConfig,
    cluster: Cluster | None,
    as_json: bool,
) -> None:
    """Answer the requests in INPUT (- for the standard input), many at a time.

    A line is a request of OpenAI's batch format (/v1/chat/completions, /v1/completions or /v1/embeddings), or an object
    with a "prompt" or with "messages". Lines of answers are written as the answers come; custom_id tells which is
    which. The same command again goes on where a run was stopped.

    As for `serve`, a request that names no temperature is sampled at 0.8.

    With --ray the requests are answered on a Ray cluster, by as many replicas of the model as it has room for.
    """
    from rest_local.batch.jobs import in_order
    from rest_local.batch.output import Output, Summary, run
    from rest_local.cli.progress import shown

    _check_paths(requests, output, as_json)
    jobs = _read(requests, shard)
    with Output(output, jobs, inputs.model_name(config.model), replace=replace) as out:
        summary = Summary(len(jobs), len(out.done.names), failed_before=out.done.failed)
        left = in_order([job for job in jobs if job.custom_id not in out.done.names])
        in_terminal = output == STANDARD and sys.stdout.isatty()
        try:
            with (
                interrupt.terminable(),
                without_messages_of_ray() if cluster else nullcontext(),
                shown(summary, in_terminal=in_terminal) as report,
                _answering(config, left, tokens, cluster) as answers,
            ):
                run(answers, out, summary, report)
        except KeyboardInterrupt as error:
            how = "terminated" if isinstance(error, interrupt.Terminated) else "interrupted"
            click.echo(f"rest-local: {how}; {_way_on(summary, output)}", err=True)
            raise
    _finish(summary, output, as_json)


@contextmanager
def _answering(
    config: EngineConfig, jobs: Sequence[Job], tokens: int | None, cluster: Cluster | None
) -> Iterator[Iterator[JobAnswer]]:
    """The answers of this machine, or of a cluster. Loads no model where every line is wrong."""
    from rest_local.batch.worker import Worker, failed_line, fitted

    failed = [failed_line(job) for job in jobs if job.error is not None]
    good = [job for job in jobs if job.error is None]
    if not good:
        yield iter(failed)
    elif cluster is not None:
        found = cluster.answers(good, config, opened=opening.open_engine, max_tokens=tokens, warn=terminal.warn)
        with closing(_joined(failed, found)) as answers:
            yield answers
    else:
        with (
            opening.open_engine(fitted(config, good, tokens)) as engine,
            Worker(engine, max_tokens=tokens) as worker,
            closing(_joined(failed, worker.answers(good))) as answers,
        ):
            yield answers


def _joined(first: Iterable[JobAnswer], second: Iterator[JobAnswer]) -> Generator[JobAnswer, None, None]:
    yield from first
    yield from second


def _read(path: Path, shard: Shard | None) -> list[Job]:
    from rest_local.batch.jobs import read_jobs, read_stream

    if path != STANDARD:
        return read_jobs(path, shard)
    return read_stream(sys.stdin.buffer, "-", shard)


def _check_paths(requests: Path, output: Path, as_json: bool) -> None:
    if output == STANDARD:
        if as_json:
            raise click.UsageError("--json prints the summary to the standard output: give -o FILE for the answers")
    elif output.exists() and requests.exists() and output.samefile(requests):
        raise OptionError(f"output {output}: is the input; give another -o")
    elif output.is_dir():
        raise OptionError(f"output {output}: is a directory; give a file")


def _way_on(summary: Summary, output: Path) -> str:
    done = summary.total - summary.left
    if output == STANDARD:
        return f"{done} of {summary.total} requests are answered; with -o FILE, the same command goes on from there"
    return f"{done} of {summary.total} requests are answered in {output}; the same command goes on from there"


def _finish(summary: Summary, output: Path, as_json: bool) -> None:
    """Print the summary. Raises RestLocalError where requests have errors."""
    if as_json:
        import json

        click.echo(json.dumps(summary.to_dict()))
    else:
        click.echo(f"rest-local: {_sentence(summary)}", err=True)
    if summary.all_failed:
        where = "" if output == STANDARD else f" in {output}"
        raise RestLocalError(
            f"{summary.all_failed} of {summary.total} requests have an error in place of an answer; "
            f"their lines{where} say why"
        )


def _sentence(summary: Summary) -> str:
    kept = f" ({summary.kept} of them before)" if summary.kept else ""
    done = f"{terminal.counted(summary.total - summary.left, 'request')} answered{kept}"
    if not summary.timings.predicted_tokens:
        return done
    return (
        f"{done}: {summary.timings.predicted_tokens} tokens in {summary.seconds:.1f} s, "
        f"{summary.tokens_per_second:.0f} tokens/s, {summary.drafted_share:.0%} of them drafted"
    )
