"""Sizes and times as options, and the options for what a build may use: memory, processes, a cluster."""

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


def size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """The callback of an option for a size."""
    try:
        return None if text is None else size_of(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no size; give one like 2G or 1500M") from error


def size_or_none(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """The callback of an option for a size that may be 0."""
    return 0 if text.strip() == "0" else size(context, parameter, text) or 0


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """The callback of an option for a time such as `90s`, `10m` or `2h`, in seconds; None for 0."""
    if text is None or text == "0":
        return None
    unit = _SECONDS.get(text[-1:].lower())
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
        if not 0 < seconds < 1e9:
            raise ValueError(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no time; give one like 90s, 10m or 2h, or 0 for never") from error
    return seconds


memory_option = click.option(
    "--memory",
    callback=size,
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
