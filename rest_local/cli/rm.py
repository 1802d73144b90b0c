"""`rest-local rm`: delete a model that was downloaded."""

from __future__ import annotations

import json
import sys

import click

from rest_local.cli import completion
from rest_local.cli.options import json_option
from rest_local.errors import ModelNotFound, OptionError


@click.command()
@click.argument("name", metavar="MODEL", shell_complete=completion.models)
@click.option("--yes", is_flag=True, allow_from_autoenv=False, help="Do not ask.")
@json_option
def rm(name: str, yes: bool, as_json: bool) -> None:
    """Delete a downloaded model from the disk, after a question.

    Models of other programs and of folders of your own are not deleted; a message says how to. What else uses the same
    files in the cache of huggingface_hub keeps them.
    """
    from rest_local.catalog.find import matching
    from rest_local.catalog.quantization import in_bytes
    from rest_local.catalog.removal import removal_of
    from rest_local.catalog.stores import stored_models

    found = matching(name, stored_models())
    if not found:
        raise ModelNotFound(name, "is not among the models on this machine", "`rest-local models` lists them")
    if len(found) > 1:
        raise OptionError(
            f"{name} names {len(found)} models: {', '.join(model.name for model in found)}; give one of them"
        )
    (model,) = found
    removal = removal_of(model)
    size = in_bytes(removal.bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("--yes deletes without asking, which a pipe cannot answer")
        click.confirm(f"Delete {model.name} ({size})?", abort=True, err=True)
    removal.run()
    if as_json:
        click.echo(json.dumps({"removed": model.name, "bytes": removal.bytes}))
    else:
        click.echo(f"removed {model.name}, {size}")
