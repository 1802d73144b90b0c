"""`--code`, `--no-code` and `--watch`: what is indexed in the background while a command decodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import completion
from rest_local.cli.sections import in_section

if TYPE_CHECKING:
    from rest_local.cli.checkout import Code

_engine = in_section("Engine")


@dataclass(frozen=True)
class Live:
    """code: a checkout to index; watch: whether the datastores of -d are kept up to date too; offers: whether a
    checkout may be offered where none was named.
    """

    code: Code | None = None
    watch: bool = False
    offers: bool = False

    def chosen(self) -> Live:
        """With the checkout of the working directory, if none was named and the user wants it. May ask."""
        if self.code is not None or not self.offers:
            return self
        from rest_local.cli import checkout

        return replace(self, code=checkout.offered(), offers=False)


ASLEEP = Live()


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --code and --no-code; the argument is `live`. Takes `watch` too where the command has it. --no-code may be
    configured, and --code counts all the same.
    """

    @functools.wraps(command)
    def gathered(*, code: Path | None, no_code: bool, watch: bool = False, **values: Any) -> Any:
        from rest_local.cli import checkout

        found = None if code is None else checkout.code_of(code)
        return command(live=Live(found, watch, offers=not no_code), **values)

    with_code = _engine(
        "--code",
        type=click.Path(path_type=Path),
        metavar="PATH",
        allow_from_autoenv=False,
        shell_complete=completion.paths,
        help="Draft from this folder, or the git checkout around it; indexed in the background, kept up to date.",
    )
    without = _engine(
        "--no-code", rare=True, is_flag=True, help="Do not ask whether to draft from the checkout, and do not."
    )
    return with_code(without(gathered))
