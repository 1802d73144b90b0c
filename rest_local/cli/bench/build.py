"""`rest-local bench build`: how fast an index is built, and where the time goes."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.bench.common import bench
from rest_local.cli.inputs import model_path
from rest_local.cli.options import json_option
from rest_local.cli.sizes import jobs_option, memory_option


@bench.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=completion.models, help="Model whose vocabulary is used."
)
@memory_option
@jobs_option
@json_option
def build(paths: tuple[str, ...], model: str | None, memory: int | None, jobs: int | None, as_json: bool) -> None:
    """Build an index of the text files below PATH... in a temporary directory, and measure it.

    Default: Python's standard library and what is installed there.
    """
    from rest_local.bench.building import bench_build

    report = bench_build(model_path(model), paths or (sysconfig.get_paths()["stdlib"],), memory, jobs)
    if not as_json:
        _print(report)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(report))


def _print(report: Mapping[str, Any]) -> None:
    whole, plain = report["end_to_end"], report["one_text_at_a_time"]
    click.echo(
        f"{whole['tokens']:,} tokens of {whole['documents']:,} files in {whole['seconds']:.1f} s: "
        f"{whole['tokens_per_second']:,} tokens/s with {report['jobs']} processes, "
        f"{whole['tokens_per_cpu_second']:,} per second of CPU"
    )
    if whole["peak_bytes"]:
        click.echo(f"at most {in_bytes(whole['peak_bytes'])} of memory in a process")
    click.echo(f"on one core, {report['sample_tokens']:,} tokens: {report['tokens_per_cpu_second']:,} tokens/s")
    for name, stage in report["stages"].items():
        click.echo(f"  {name:<15} {stage['share']:6.1%} {stage['seconds']:8.2f} s")
    same = "the same ids" if plain["same_ids"] else "OTHER IDS"
    click.echo(f"one text at a time: {plain['tokens_per_cpu_second']:,} tokens/s on one core, {same}")
