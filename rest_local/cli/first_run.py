"""Says what to do next where no model was named: five lines, with what is on the disk already.

`rest-local` alone prints them; a command that needs a model to converse with asks at a terminal which one to take.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rest_local.errors import OptionError

if TYPE_CHECKING:
    from rest_local.catalog.describe import ModelFacts
    from rest_local.catalog.stores import StoredModel

OFFERED = 5  # models to choose from
LOOKED_AT = 20  # of the newest: each header takes up to 50 ms the first time

# Least main memory in GB, and a model of that family that leaves half of it free: 4.7, 2.1, 1.1 and 0.5 GB.
_SUGGESTED = ((12, "7B"), (6, "3B"), (3, "1.5B"), (0, "0.5B"))
FEW_PROCESSORS, SMALL_GB = 4, 4.0  # with so few, no model that wants more memory than this


def next_steps() -> list[str]:
    """The lines of `rest-local` alone."""
    newest = _newest()
    what = "rest-local runs GGUF models on this machine, faster with the same output."
    help_ = "`rest-local demo` shows the gain, `rest-local --help` lists the commands."
    if newest:
        name = newest[0].name
        here = "One model is" if len(newest) == 1 else f"{len(newest)} models are"
        return [
            what,
            f"{here} here (`rest-local models`). Draft from your code, and talk:",
            f"    rest-local index build ~/src/myproject -m {name}",
            f"    rest-local chat -m {name}",
            help_,
        ]
    return [what, *_download(), help_]


def choose() -> str:
    """The name of the model that the user chooses at a terminal, of the newest that can converse.

    Raises OptionError where there is none, or no terminal, after lines on stderr that say what to do.
    """
    found = _that_converse()
    if not found:
        pull = f"    rest-local pull {suggestion()}"
        _say(["No model was named, and none that can converse is on this machine. This one fits its memory:", pull])
        raise OptionError("no model was named; download one, then give its name with -m")
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        _say(["No model was named. On this machine:", *(f"    -m {model.name}" for model in found[: OFFERED - 2])])
        raise OptionError("no model was named; give one with -m, `rest-local models` lists all")
    from rest_local.catalog.quantization import in_bytes

    width = max(len(model.name) for model in found)
    _say(["No model was named (-m). On this machine:"])
    _say([f"  {n}  {model.name:<{width}}  {in_bytes(model.bytes):>7}" for n, model in enumerate(found, 1)])
    number = click.prompt("Which one", type=click.IntRange(1, len(found)), default=1, err=True)
    return found[int(number) - 1].name


def suggestion() -> str:
    """A model of a hub that fits the main memory of this machine, and its processors: each token reads all of it."""
    from rest_local.llama.cores import usable_cpus

    memory = min(_memory_gb(), SMALL_GB if len(usable_cpus()) <= FEW_PROCESSORS else math.inf)
    size = next(size for least, size in _SUGGESTED if memory >= least)
    return f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF:Q4_K_M"


def _download() -> list[str]:
    name = suggestion()
    return [
        "No model is here yet. This one fits the memory of this machine:",
        f"    rest-local pull {name}",
        f"    rest-local chat -m {name}",
    ]


def _newest() -> list[StoredModel]:
    """The models on the disk, the newest first, without the demo model."""
    from rest_local.catalog.stores import DEMO, stored_models

    def changed(model: StoredModel) -> float:
        try:
            return model.path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted((model for model in stored_models() if model.store != DEMO), key=changed, reverse=True)


def _that_converse() -> list[ModelFacts]:
    from rest_local.catalog.describe import list_models

    facts = list_models(_newest()[:LOOKED_AT])
    return [each for each in facts if each.header.chat_template and not each.error][:OFFERED]


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _memory_gb() -> float:
    """Main memory; 8 where the platform does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (AttributeError, ValueError, OSError):
        return 8.0
