"""The options for what a build may use: memory, processes, a cluster."""

from __future__ import annotations

import click

_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


def size_of(text: str) -> int:
    """Bytes of a size such as `1500M` or `2G`; units are powers of 1024. Raises ValueError."""
    text = text.strip().upper().removesuffix("B")
    unit = _UNITS.get(text[-1:], 0)
    size = float(text[:-1] if unit else text) * (1 << unit)
    if not 1 <= size < 1 << 62:
        raise ValueError(f"a size of {text}")
    return int(size)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else size_of(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no size; give one like 2G or 1500M") from error


memory_option = click.option(
    "--memory",
    callback=_size,
    metavar="SIZE",
    help="Memory of all processes together, such as 2G. Default: a quarter of the machine's.",
)
jobs_option = click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes. Default: one a core.")
ray_option = click.option(
    "--ray",
    metavar="ADDRESS",
    help="Build on a Ray cluster: `auto` for the one that this machine is a node of, host:port, or `local`. Each task "
    "gets --memory divided by --jobs. Needs rest-local[ray].",
)
