"""`rest-local batch`: read a file of requests, and write a file of answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import inputs, interrupt, opening, options, terminal
from rest_local.cli.sections import SectionedCommand, option
from rest_local.decoding.config import EngineConfig
from rest_local.errors import OptionError, RestLocalError

if TYPE_CHECKING:
    from rest_local.batch.cluster import Cluster
    from rest_local.batch.jobs import Job
    from rest_local.batch.output import Summary
    from rest_local.batch.worker import JobAnswer

STANDARD = Path("-")
# Seconds between two lines about the progress if there is no bar.
LINE_S = 60.0


@click.command(cls=SectionedCommand)
@click.argument("requests", metavar="INPUT", type=click.Path(path_type=Path))
@option(
    "-o --output FILE",
    "Write the answers to FILE. Default: the standard output.",
    default=STANDARD,
    configurable=False,
    show_default=False,
)
@option("--replace", "Overwrite FILE. Without it a run goes on after the answers that FILE has.", configurable=False)
@option(
    "-n --tokens --n-predict --predict N",
    "Generate at most N tokens for a request that names no limit. Default: as many as the context holds.",
    also="--max-tokens",
    type=click.IntRange(min=0),
)
@options.engine_options
@options.sampling_defaults
@options.history_option
@option(
    "--ray ADDRESS",
    "Run on a Ray cluster: `auto` for the one that this machine is a node of, host:port, or `local` for "
    "replicas on this machine, such as one for each GPU. Needs rest-local[ray].",
)
@option("--replicas N", "With --ray: run N replicas of the model. Default: as many as the nodes have room for.")
@option(
    "--replica-gpus X",
    "With --ray: give each replica X GPUs, or a part of one. Default: 1 if the cluster has GPUs.",
    type=click.FloatRange(min=0),
)
@option("--json", "Print the summary as one line of JSON; needs -o.", to="as_json")
def batch(
    requests: Path,
    output: Path,
    replace: bool,
    tokens: int | None,
    config: EngineConfig,
    ray: str | None,
    replicas: int | None,
    replica_gpus: float | None,
    as_json: bool,
) -> None:
    """Answer the requests in INPUT (- for the standard input), many at a time.

    Each line is a request in OpenAI's batch format (/v1/chat/completions, /v1/completions or /v1/embeddings), or an
    object with a "prompt" or "messages". Answers are written as they come, and custom_id tells which is which. The same
    command again continues a run that was stopped.

    The sampling options apply to requests that do not set their own.

    With --ray the requests are answered on a Ray cluster, by as many replicas of the model as it has room for. Each has
    -t CPUs; without -t that is 1 with a GPU, or as many as the smallest node has.
    """
    from rest_local.batch.jobs import in_order, read_jobs, read_stream
    from rest_local.batch.output import Output, Summary, run

    cluster = None
    if ray is not None:
        from rest_local.batch.cluster import Cluster

        cluster = Cluster(ray, replicas, replica_gpus)
    elif (replicas, replica_gpus) != (None, None):
        raise click.UsageError("--replicas and --replica-gpus need --ray")
    if output == STANDARD and as_json:
        raise click.UsageError("--json prints the summary to the standard output: give -o FILE for the answers")
    if output.is_dir():
        raise OptionError(f"output {output}: is a directory; give a file")
    if output != STANDARD and output.exists() and requests.exists() and output.samefile(requests):
        raise OptionError(f"output {output}: is the input; give another -o")
    jobs = read_stream(sys.stdin.buffer, "-") if requests == STANDARD else read_jobs(requests)
    model = inputs.model_name(config.model)
    with Output(output, jobs, model, replace=replace) as out:
        summary = Summary(len(jobs), len(out.done.names), failed_before=out.done.failed)
        left = in_order([job for job in jobs if job.custom_id not in out.done.names])
        try:
            with (
                interrupt.terminable(),
                terminal.without_messages_of_ray() if cluster else nullcontext(),
                _progress(hidden=output == STANDARD and sys.stdout.isatty()) as report,
                _answering(config, model, left, tokens, cluster) as answers,
            ):
                run(answers, out, summary, report)
        except KeyboardInterrupt as error:
            how = "terminated" if isinstance(error, interrupt.Terminated) else "interrupted"
            done = f"{summary.total - summary.left} of {summary.total} requests are answered"
            way_on = "; with -o FILE, the same command goes on from there"
            if output != STANDARD:
                way_on = f" in {output}; the same command goes on from there"
            click.echo(f"rest-local: {how}; {done}{way_on}", err=True)
            raise
    if as_json:
        terminal.print_json(summary.to_dict())
    else:
        click.echo(f"rest-local: {_sentence(summary)}", err=True)
    if summary.all_failed:
        where = "" if output == STANDARD else f" in {output}"
        raise RestLocalError(
            f"{summary.all_failed} of {summary.total} requests have an error in place of an answer; "
            f"their lines{where} say why"
        )


@contextmanager
def _answering(
    config: EngineConfig, model: str, jobs: Sequence[Job], tokens: int | None, cluster: Cluster | None
) -> Iterator[Iterator[JobAnswer]]:
    """Yield the answers, from this machine or from a cluster. If every line is wrong, no model is loaded."""
    from rest_local.batch.worker import Worker, failed_line, fitted

    if all(job.error is not None for job in jobs):
        yield map(failed_line, jobs)
    elif cluster is not None:
        with closing(
            cluster.answers(
                jobs, config, opened=opening.open_engine, model=model, max_tokens=tokens, warn=terminal.warn
            )
        ) as answers:
            yield answers
    else:
        with (
            opening.open_engine(fitted(config, jobs, tokens)) as engine,
            Worker(engine, model, max_tokens=tokens) as worker,
            closing(worker.answers(jobs)) as answers,
        ):
            yield answers


@contextmanager
def _progress(hidden: bool) -> Iterator[Callable[[Summary], None]]:
    """Yield a function that shows the progress as a bar or lines, unless answers on the terminal leave it `hidden`."""
    last = time.monotonic()
    with terminal.Bar(quiet=hidden) as bar:

        def report(summary: Summary) -> None:
            nonlocal last
            done = summary.total - summary.left
            bar.show("", done, summary.total, f"{done}/{summary.total}, {_rates(summary)}")
            if bar.hidden and summary.left and time.monotonic() - last >= LINE_S:
                last = time.monotonic()
                click.echo(f"rest-local: {done} of {summary.total} requests, {_rates(summary)}", err=True)

        yield report


def _rates(summary: Summary) -> str:
    """Return the tokens per second, the share of drafted tokens, and the time left."""
    parts = [f"{summary.tokens_per_second:.0f} tokens/s", f"{summary.drafted_share:.0%} drafted"]
    if summary.seconds_left is not None and summary.left:
        parts.append(f"{terminal.duration(summary.seconds_left)} left")
    if summary.all_failed:
        parts.append(f"{summary.all_failed} failed")
    return ", ".join(parts)


def _sentence(summary: Summary) -> str:
    kept = f" ({summary.answered_before} of them before)" if summary.answered_before else ""
    done = f"{terminal.counted(summary.total - summary.left, 'request')} answered{kept}"
    if not summary.timings.predicted_tokens:
        return done
    return (
        f"{done}: {summary.timings.predicted_tokens} tokens in {summary.seconds:.1f} s, "
        f"{summary.tokens_per_second:.0f} tokens/s, {summary.drafted_share:.0%} of them drafted"
    )
