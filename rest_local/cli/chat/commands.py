"""The commands of a chat: `/help`, `/set`, and the others of COMMANDS, with their completion.

Each command is a function of the chat and of the text after the word. It raises a RestLocalError to refuse.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from rest_local.cli import inputs
from rest_local.cli.chat.conversation import Attachment, NamedSession, session_names
from rest_local.cli.chat.display import COLOURS, of_source
from rest_local.cli.chat.prompt import is_dumb, unquoted
from rest_local.cli.chat.talk import Talk, note
from rest_local.cli.terminal import columns, counted, sampling_rows
from rest_local.errors import InputInvalid, OptionError, PromptTooLong, RestLocalError, in_options
from rest_local.llama.options import NUMBERS
from rest_local.llama.sampling_defaults import DEFAULTS

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
KEYS = (*NUMBERS, "tokens", "stop")
WIDEST = 100


class Leave(Exception):
    """The user leaves."""


@dataclass(frozen=True)
class Command:
    """A command of the chat. `usage` is what may follow the word."""

    run: Callable[[Talk, str], object]
    usage: str
    help: str


def perform(talk: Talk, text: str, interrupted: bool = False) -> None:
    """Run the command or answer the question that the user typed. Errors are shown and end nothing.

    If that was `interrupted` already, do neither; a question then waits for `/retry`. Raises Leave, KeyboardInterrupt.
    """
    try:
        found = _COMMAND.fullmatch(text.strip())
        if interrupted:
            if found is None:
                talk.conversation.ask(text)
            raise KeyboardInterrupt
        if found is None:
            talk.ask(text)
        elif found[1] in COMMANDS:
            COMMANDS[found[1]].run(talk, (found[2] or "").strip())
        else:
            raise OptionError(f"/{found[1]}: no such command; /help lists them")
    except RestLocalError as error:
        note(f"rest-local: error: {in_options(str(error))}")
        if isinstance(error, PromptTooLong) and len(talk.conversation.messages) > 1:
            note("the conversation fills the context; /clear forgets it")
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        note(f"rest-local: error: {error.filename or 'output'}: {error.strerror or error}")


def _help(talk: Talk, argument: str) -> None:
    rows = [(f"/{name} {command.usage}", command.help) for name, command in COMMANDS.items()]
    rows += [
        ('"""', "begins a message of many lines, up to the next one"),
        ("Alt-Enter", "another line"),
        ("Ctrl-X Ctrl-E", "write the message in $EDITOR"),
        ("Ctrl-C", "stop the answer; what came of it stays"),
        ("Ctrl-D", "leave"),
    ]
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, WIDEST))
    formatter.write_dl(rows)
    note(formatter.getvalue().rstrip())


def _set(talk: Talk, argument: str) -> None:
    name, _, value = argument.partition(" ")
    name = {"temp": "temperature", "n": "tokens"}.get(name, name).replace("-", "_")
    if not name:
        settings, origins = talk.settings, talk.engine.sampling.origins(**talk.settings.sampling)
        rows = sampling_rows({name: {"value": value, "from": origin} for name, (value, origin) in origins.items()})
        note("\n".join(columns(list(rows.items()))))
        note(f"tokens {settings.tokens}\nstop {' '.join(map(repr, settings.stop)) or None}")
    elif name in NUMBERS:
        talk.settings = replace(talk.settings, sampling=_with_number(talk, name, value.strip()))
    elif name == "tokens":
        if not (value.strip() == "-1" or value.strip().isdecimal()):
            raise OptionError(f"/set tokens {value}: give a number, or -1 for no limit")
        talk.settings = replace(talk.settings, tokens=int(value))
    elif name == "stop":
        talk.settings = replace(talk.settings, stop=(value,) if value else ())
    else:
        raise OptionError(f"/set {name}: no such setting; give one of {', '.join(KEYS)}")


def _with_number(talk: Talk, name: str, value: str) -> dict[str, Any]:
    """Return the numbers set here with one changed, or without it for the value `default`. Raises OptionError."""
    others = {key: there for key, there in talk.settings.sampling.items() if key != name}
    if value == "default":
        return others
    if name == "seed" and value in ("", "none", "random"):
        return {**others, name: None}
    try:
        changed = {**others, name: (int if name == "seed" else type(DEFAULTS[name]))(value)}
    except ValueError:
        raise OptionError(f"/set {name} {value}: give a number, or default") from None
    talk.engine.sampling(**changed)
    return changed


def _switched(value: str, now: bool) -> bool:
    if value.strip() not in ("", "on", "off"):
        raise OptionError(f"{value.strip()}: give on or off")
    return value.strip() == "on" if value.strip() else not now


def _system(talk: Talk, argument: str) -> None:
    if not argument:
        note(talk.conversation.system or "there is no system message")
        return
    text = unquoted(argument)
    talk.conversation.system = None if text in ("", "none") else text
    talk.write()


def _save(talk: Talk, argument: str) -> None:
    if not argument or (talk.session is not None and talk.session.name == argument):
        if talk.session is None:
            raise OptionError("/save: give a name")
        talk.write()
        return
    session = NamedSession(argument)
    if session.exists and not _confirmed(f"Session {argument} exists. Replace it?"):
        session.close()
        return
    talk.save_as(session)
    note(f"saved as {session.path}")


def _confirmed(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C and Ctrl-D mean no.
        return False


def _clear(talk: Talk, argument: str) -> None:
    if talk.session is not None and talk.conversation.messages:
        note(f"session {talk.session.name} keeps what it holds; the chat goes on without a name")
        talk.leave_session()
    talk.conversation.clear()


def _undo(talk: Talk, argument: str) -> None:
    if not talk.conversation.undo():
        raise OptionError("there is nothing to take back")
    talk.write()
    left = " ".join((talk.conversation.question or "").split())
    shown = left if len(left) <= 60 else f"{left[:57]}..."
    note(f"taken back; the newest question is now: {shown}" if left else "taken back; nothing is left")


def _file(talk: Talk, argument: str) -> None:
    if not argument:
        raise OptionError("/file: give a path")
    path = Path(unwrapped(argument)).expanduser()
    text = inputs.read_text(path, "file").replace("\r\n", "\n")
    if "\0" in text:
        raise InputInvalid("file", path, "not a text file")
    talk.conversation.attachments.append(Attachment(path.name, text))
    n_lines = len(text.splitlines())
    note(f"{path.name}: {counted(n_lines, 'line')} {'goes' if n_lines == 1 else 'go'} with the next message")


def _image(talk: Talk, argument: str) -> None:
    if not argument:
        raise OptionError("/image: give a path")
    path = Path(unwrapped(argument)).expanduser()
    talk.attach_images([inputs.read_image(path)])
    note(f"{path.name} goes with the next message")


def unwrapped(path: str) -> str:
    """Remove the quotes that a shell or a file manager puts around a path."""
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"" else path


def _drafts(talk: Talk, argument: str) -> None:
    drafts = _switched(argument, talk.settings.drafts)
    talk.settings = replace(talk.settings, drafts=drafts)
    if not drafts:
        note("drafted tokens are not marked any more")
        return
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and not is_dumb()
    sources = " ".join(of_source(source, source, colours) for source in COLOURS)
    click.echo(f"drafted tokens are underlined, by source: {sources}", err=True)


def _bye(talk: Talk, argument: str) -> None:
    raise Leave


COMMANDS = {
    "help": Command(_help, "", "this text"),
    "set": Command(_set, "[NAME VALUE]", "show or change temperature, top_p, seed, tokens, stop ..."),
    "system": Command(_system, "[TEXT]", "show or change the system message; none removes it"),
    "save": Command(_save, "[NAME]", "keep the conversation as a session, for `chat --session NAME`"),
    "clear": Command(_clear, "", "forget the conversation, not the system message"),
    "undo": Command(_undo, "", "take back the newest question and its answer"),
    "retry": Command(lambda talk, argument: talk.retry(), "", "answer the newest question again"),
    "file": Command(_file, "PATH", "send a file with the next message"),
    "image": Command(_image, "PATH", "send an image with the next message, where the model has a projector"),
    "drafts": Command(_drafts, "[on|off]", "underline drafted tokens, in the colour of their source"),
    "bye": Command(_bye, "", "leave"),
}


def completions(text: str) -> Iterator[tuple[str, int]]:
    """Yield what may stand at the end of `text`, and where that begins, counted from the end."""
    if not text.startswith("/") or "\n" in text:
        return
    word, space, rest = text[1:].partition(" ")
    if not space:
        yield from ((f"/{name}", -len(text)) for name in COMMANDS if name.startswith(word))
        return
    for choice in _choices(word, rest):
        if choice.startswith(rest):
            yield choice, -len(rest)


def _choices(word: str, rest: str) -> Iterator[str]:
    """Yield what may follow a command, including all texts that begin with `rest`."""
    if word in ("file", "image"):
        yield from paths(rest)
    elif word == "set":
        yield from KEYS
    elif word == "save":
        yield from session_names()
    elif word == "drafts":
        yield from ("on", "off")


def paths(begun: str) -> Iterator[str]:
    """Yield folders and files that begin like this, hidden ones only after a typed dot."""
    folder, name = os.path.split(begun)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") and not name.startswith("."):
            continue
        yield os.path.join(folder, entry.name) + (os.sep if entry.is_dir() else "")
