"""Entry point of `rest-local`: the lazy command group, and the one place where errors become exit codes.

The exit codes are 0 for success, 1 for an error at run time (such as a missing file, or a closed output), 2 for wrong
usage that the command line alone shows, 130 for an interrupt, and 143 for a batch that SIGTERM ended. Every error is
one line on stderr, `rest-local: error: ...`. This module imports only click and the standard library; commands import
numpy, llama.cpp and rich when they run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from rest_local import __version__
from rest_local.cli import completion, interrupt
from rest_local.cli.sections import WIDEST, SummaryGroup, without_range
from rest_local.cli.terminal import fitted
from rest_local.errors import RestLocalError, in_options

COMMANDS = (
    "generate", "chat", "edit", "batch", "serve", "models", "pull", "index", "history", "demo", "doctor", "tune",
    "config", "completion",
)  # fmt: skip
ALSO = {  # People who know other programs try these names.
    "run": "chat", "ask": "chat", "complete": "generate", "ls": "models", "list": "models", "download": "pull",
    "search": "index search", "update": "index update", "build": "index build",
}  # fmt: skip
MODULES = {"pull": "models", "tune": "doctor"}  # Other commands have a module of their own name.


class LazyGroup(SummaryGroup):
    """A group that loads the module of a command when it is used. The attribute of the same name is the command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"rest_local.cli.{MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        return command


@click.group(
    cls=LazyGroup,
    also=ALSO,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
@click.version_option(__version__, prog_name="rest-local", help="Show the version and exit.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run local GGUF models faster, with the same output.

    Drafts come from text that was written before, such as your code and this conversation, and the model verifies many
    tokens at a time. Every option can be set in the environment (--top-k is REST_LOCAL_TOP_K) and in a file (see
    `config`).
    """
    if ctx.invoked_subcommand is None:
        from rest_local.cli.models import next_steps

        click.echo("\n".join(next_steps()))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Nothing that a user can cause is raised."""
    try:
        with cli.make_context("rest-local", list(arguments)) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as exit_:  # --help and --version raise it.
        return exit_.exit_code
    except click.ClickException as error:
        message = _usage_line(error)
        if "\n" in message:  # It is the help of a group that was called without a command.
            return _say(message, error.exit_code)
        return _fail(message, error.exit_code)
    except RestLocalError as error:
        return _fail(in_options(str(error)), error.exit_code)
    except interrupt.Terminated:
        return interrupt.TERMINATED
    except click.Abort:
        return _say("", interrupt.EXIT_CODE)  # The cursor is still behind the question that was left.
    except KeyboardInterrupt:
        return interrupt.EXIT_CODE
    except BrokenPipeError:
        return _output_closed()
    except ImportError as error:
        return _fail(f"{error}; `pip install rest-local` installs what is needed", 1)
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)


def _usage_line(error: click.ClickException) -> str:
    """Return the message of a click error, and after wrong usage where the help is."""
    message = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or message.startswith("Usage:"):
        return message
    message = " ".join(message.split())  # Choices that are missing are listed in lines of their own.
    message = without_range(message)
    message = re.sub(r"\.? \(?Did you mean (.*?)\?\)?$", r" (did you mean \1?)", message)  # Versions of click differ.
    return f"{message.rstrip('.')}; see `{context.command_path} --help`"


def _fail(message: str, code: int) -> int:
    return _say(fitted(f"rest-local: error: {message}", sys.stderr), code)


def _say(message: str, code: int) -> int:
    try:
        click.echo(message, err=True)
        sys.stdout.flush()
    except OSError:
        _output_closed()
    return code


def _output_closed() -> int:
    """Point stdout at nothing, so that the interpreter's last flush cannot complain about a closed reader."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
    return 1


def _open_standard_streams() -> None:
    """Give a closed standard stream (`<&-`, `>&-`) the null device. Else the next opened file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def main() -> None:
    _open_standard_streams()
    interrupt.watch()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # A terminal that cannot show a character gets "?", never a traceback.
            stream.reconfigure(errors="replace")
    sys.exit(completion.answer(cli) if completion.VARIABLE in os.environ else run(sys.argv[1:]))
