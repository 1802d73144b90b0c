"""`rest-local models` and `pull`: list and download models, without loading any.

`rest-local` alone prints what to do next with them (`next_steps`).
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli.sections import SectionedCommand, option
from rest_local.cli.terminal import Bar, columns, json_option, print_json
from rest_local.errors import HubError, ModelNotFound, ModelNotHere, printable

if TYPE_CHECKING:
    from rest_local.catalog.describe import ModelFacts
    from rest_local.catalog.hub import Hub, ModelFiles, Repository
    from rest_local.catalog.stores import StoredModel

HEADINGS = ("NAME", "SIZE", "QUANT", "CONTEXT", "CHAT", "MEMORY", "DRAFTING")
BAR_AFTER_S = 1.0

# The least main memory in GB, and a model that leaves half of it free: they take 4.7, 2.1, 1.1 and 0.5 GB.
_SUGGESTED = ((12, "7B"), (6, "3B"), (3, "1.5B"), (0, "0.5B"))
# A machine with so few processors is treated as if it had no more memory than this, since larger models are slow.
FEW_PROCESSORS, SMALL_GB = 4, 4.0


@click.command(cls=SectionedCommand)
@json_option
def models(as_json: bool) -> None:
    """List the models on this machine; -m takes their names.

    Looks into the cache of huggingface_hub, the stores of Ollama and LM Studio, and the folders that the environment
    names in REST_LOCAL_MODELS. MEMORY is an estimate for 4,096 tokens of context and, of a hybrid
    or recurrent model, one slot's state with its snapshots (--rollback). DRAFTING says whether drafts can be verified.
    """
    from rest_local.catalog.describe import list_models
    from rest_local.catalog.stores import DEFAULT, PACKAGE

    with Bar(as_json) as bar:

        def progress(done: int, total: int) -> None:
            if bar.seconds > BAR_AFTER_S:
                bar.show("reading models", done, total)

        found = list_models(progress=progress)
    if as_json:
        rows = [{**asdict(facts), **asdict(facts.header)} for facts in found]
        return print_json([{key: row[key] for key in row if key not in ("header", "kind")} for row in rows])
    for line in columns([HEADINGS, *map(row_of, found)], right=(1, 3, 5)):
        click.echo(line)
    if all(facts.store == PACKAGE for facts in found):
        here = f"Only {DEFAULT}, a small model, is here." if found else "No model is here."
        click.echo(f"{here} A larger one: rest-local pull {suggestion()}", err=True)
    return None


def row_of(facts: ModelFacts) -> tuple[str, ...]:
    """Return the columns of one model. A damaged model has its error in place of all columns but the name."""
    from rest_local.catalog.describe import snapshots_of

    if facts.error:
        return (printable(facts.name), f"cannot be used: {printable(facts.error)}")
    header = facts.header
    drafting = ["no" if header.drafting == "none" else "yes"]
    if header.state_bytes:
        number = snapshots_of(header)
        drafting.append(f"{number} snapshots of {in_bytes(header.state_bytes)}" if number else "checkpoints")
    return (
        printable(facts.name),
        in_bytes(facts.bytes),
        header.quantization,
        f"{header.n_ctx_train:,}" if header.n_ctx_train else "",
        "yes" if header.chat_template else "no",
        in_bytes(facts.memory_bytes),
        ", ".join(drafting),
    )


@click.command(cls=SectionedCommand)
@click.argument("name", metavar="USER/REPO[:QUANT]")
@option("--list", "Show what there is; download nothing.", to="list_", configurable=False)
@json_option
def pull(name: str, list_: bool, as_json: bool) -> None:
    """Download a model from the Hugging Face Hub, and print its path.

    QUANT is a quantization (Q4_K_M) or the name of a file, such as a projector for images. Without it you get the usual
    one, with about 5 bits a weight. An interrupted download continues where it stopped, and the checksum of every file
    is compared.

    The files go to the cache of huggingface_hub, which other programs share. HF_TOKEN, HF_HOME, HF_ENDPOINT and
    HF_HUB_OFFLINE have their usual meaning.
    """
    from rest_local.catalog.hub import Hub, parsed
    from rest_local.catalog.stores import find_model

    hub, wanted = Hub(), parsed(name)
    if list_:
        return _list(hub, hub.repository(wanted.repo), as_json)
    try:
        repository = hub.repository(wanted.repo)
    except HubError as error:
        try:
            path = find_model(name).path
        except ModelNotFound:
            raise error from None
        click.echo(f"{name} is on the disk already; {error.cause}", err=True)
        return _done(name, path, 0, as_json)
    choice, why = repository.choose(wanted.label)
    size = hub.missing(repository, choice)
    if not as_json:
        _announce(repository, choice, why, size)
    path = download(hub, repository, choice, quiet=as_json)
    return _done(f"{wanted.repo}:{choice.label}", path, size, as_json)


def _announce(repository: Repository, choice: ModelFiles, why: str, size: int) -> None:
    parts = f" in {len(choice.files)} files" if len(choice.files) > 1 else ""
    state = "is here already" if not size else in_bytes(choice.size) + parts
    if 0 < size < choice.size:
        state += f", of which {in_bytes(choice.size - size)} are here"
    click.echo(f"{repository.name}:{choice.label}: {state}" + (f" ({why})" if why else ""), err=True)
    others = [f"{each.label} {in_bytes(each.size)}" for each in repository.choices if each is not choice]
    if why and others:
        click.echo(f"There are also: {', '.join(others)}", err=True)
    if repository.projectors and choice not in repository.projectors:
        seeing = repository.projectors[0].files[0].name
        click.echo(f"For images: rest-local pull {repository.name}:{seeing}", err=True)


def _done(name: str, path: Path, size: int, as_json: bool) -> None:
    if as_json:
        return print_json({"name": name, "path": str(path), "downloaded": size})
    from rest_local.catalog.stores import is_projector_file

    click.echo(str(path))
    if sys.stderr.isatty() and not is_projector_file(path.name):
        click.echo(f"Use it: rest-local chat -m {name}", err=True)
    return None


def _list(hub: Hub, repository: Repository, as_json: bool) -> None:
    missing = {choice.label: hub.missing(repository, choice) for choice in repository.choices}
    if as_json:
        listed = []
        for choice in repository.choices:
            named = {"name": f"{repository.name}:{choice.label}", "bytes": choice.size}
            files = [file.name for file in choice.files]
            listed.append({**named, "files": files, "missing": missing[choice.label]})
        return print_json(listed)
    rows = []
    for choice in repository.choices:
        left = missing[choice.label]
        here = "" if left == choice.size else "  partly here" if left else "  here"
        rows.append((choice.label, in_bytes(choice.size), f"{choice.files[0].name}{here}"))
    return click.echo("\n".join(columns(rows, right=(1,))))


def offer(error: ModelNotHere) -> Path:
    """Offer to download the model that is not here, and do it. Raises the error if the user says no."""
    from rest_local.catalog.hub import Hub, parsed

    hub, wanted = Hub(), parsed(error.name)
    repository = hub.repository(wanted.repo)
    choice, _ = repository.choose(wanted.label)
    size = hub.missing(repository, choice)
    named = f"{wanted.repo}:{choice.label}"
    if not click.confirm(f"{named} is not on this machine. Download it ({in_bytes(size)})?", default=True, err=True):
        raise error
    return download(hub, repository, choice)


def download(hub: Hub, repository: Repository, choice: ModelFiles, quiet: bool = False) -> Path:
    """Download with a bar on stderr if that is a terminal. After Ctrl-C it says that nothing is lost."""
    try:
        with Bar(quiet) as bar:

            def progress(done: int, total: int) -> None:
                text = "checking" if done == total else "downloading"
                bar.show(text, done, total, f"{in_bytes(done)} of {in_bytes(total)}")

            def notice(text: str) -> None:
                if not quiet:
                    bar.say(f"rest-local: {text}")

            return hub.download(repository, choice, progress, notice)
    except KeyboardInterrupt:
        left = hub.missing(repository, choice)
        kept = f"{in_bytes(choice.size - left)} of {in_bytes(choice.size)} are kept"
        click.echo(f"rest-local: {kept}; the same command goes on there", err=True)
        raise


def next_steps() -> list[str]:
    """Return what `rest-local` alone prints: what to do next with the models that are on the disk."""
    from rest_local.catalog.stores import DEFAULT, PACKAGE

    newest = _newest()
    name = newest[0].name if newest else suggestion()
    if not newest:
        steps = [
            "No model is here yet. This one fits the memory of this machine:",
            f"    rest-local pull {name}",
            f"    rest-local chat -m {name}",
        ]
    elif newest[0].store == PACKAGE:
        steps = [
            f"{DEFAULT}, a small model, is here. Talk to it, or get a larger one:",
            "    rest-local chat",
            f"    rest-local pull {suggestion()}",
        ]
    else:
        here = "One model is" if len(newest) == 1 else f"{len(newest)} models are"
        steps = [
            f"{here} here (`rest-local models`). Draft from your code, and talk:",
            f"    rest-local index build ~/src/myproject -m {name}",
            f"    rest-local chat -m {name}",
        ]
    return [
        "rest-local runs GGUF models on this machine, faster with the same output.",
        *steps,
        "`rest-local demo` shows the gain, `rest-local --help` lists the commands.",
    ]


def suggestion() -> str:
    """Suggest a model of a hub that fits the memory and the processors of this machine."""
    from rest_local.llama.cores import usable_cpus

    memory = min(_memory_gb(), SMALL_GB if len(usable_cpus()) <= FEW_PROCESSORS else math.inf)
    size = next(size for least, size in _SUGGESTED if memory >= least)
    return f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF:Q4_K_M"


def _newest() -> list[StoredModel]:
    """Return the models on the disk, the newest first, and the default model last."""
    from rest_local.catalog.stores import PACKAGE, stored_models

    def changed(model: StoredModel) -> tuple[bool, float]:
        try:
            return model.store != PACKAGE, model.path.stat().st_mtime
        except OSError:
            return False, 0.0

    return sorted(stored_models(), key=changed, reverse=True)


def _memory_gb() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
