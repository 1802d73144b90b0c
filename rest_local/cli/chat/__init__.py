"""`rest-local chat`: talk to a model in the terminal, or ask it one question from the command line or a pipe.

- A question on the command line, a pipe, or both give one answer. A pipe is one text, whatever its lines, and is
  attached to the question if there is one.
- A terminal starts a conversation, until `/bye`, Ctrl-D, or Ctrl-C twice at an empty line (exit code 130).

If Ctrl-C stops the answer to one question, the exit code is 130. A conversation goes on.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import indexer, inputs, interrupt, opening, options
from rest_local.cli.indexer import Live, code_options
from rest_local.cli.sections import SectionedCommand, option
from rest_local.decoding.config import EngineConfig

if TYPE_CHECKING:
    from rest_local.cli.chat.talk import Talk
    from rest_local.decoding.engine import Engine
    from rest_local.grammar.grammar import Grammar

CELL_BYTES = 8 << 30  # The disk for KV cells of all models, as by default in `serve`.


@click.command(cls=SectionedCommand)
@click.argument("question", required=False, metavar="[QUESTION | -]")
@options.engine_options
@options.projector_option
@options.history_option
@code_options
@options.tokens_option(-1, "Generate at most N tokens an answer. -1 goes on until it ends or the context is full.")
@option(
    "--image FILE",
    "Send this image with the question; may be repeated. Needs a projector (--mmproj).",
    to="images",
    multiple=True,
)
@option("--system TEXT", "Start the conversation with this system message.", also="-sys --system-prompt")
@option("--session NAME", "Keep the conversation under this name, and continue it if it exists.")
@options.template_option
@options.sampling_options
@options.stop_option
@options.quiet_option
@option("--json", "Print one line of JSON for each answer instead.", to="as_json")
def chat(
    question: str | None,
    config: EngineConfig,
    live: Live,
    grammar: Grammar | None,
    tokens: int,
    images: tuple[Path, ...],
    system: str | None,
    session: str | None,
    chat_template_file: Path | None,
    stop: tuple[str, ...],
    quiet: bool,
    as_json: bool,
) -> None:
    """Talk to the model, or ask it one QUESTION.

    What comes through a pipe is one text and goes with the question: git diff | rest-local chat "review this". In a
    conversation /help lists the commands, Ctrl-C stops the answer, and Ctrl-D leaves.
    """
    from rest_local.cli.chat.conversation import NamedSession
    from rest_local.cli.chat.talk import Talk, TalkOptions

    asked = _question(question)
    pictures = [inputs.read_image(path) for path in images]
    template = None if chat_template_file is None else inputs.read_text(chat_template_file, "chat template")
    if template is None:  # With a template of the user's own, any model will do.
        config = replace(config, model=inputs.model_path(config.model))  # Refuse before `live.chosen` asks.
    live = live.chosen()
    with ExitStack() as stack:
        named = None if session is None else stack.enter_context(NamedSession(session))
        kept = None if named is None else named.read()  # Report a damaged session before the model is loaded.
        settings = TalkOptions({"grammar": grammar}, tokens, stop)
        if named is not None or asked is None:  # A conversation without a name may get one.
            config = replace(config, sessions=CELL_BYTES)
        engine = _open(config, template, live)
        talk = stack.enter_context(Talk(engine, settings, as_json=as_json, quiet=quiet, interactive=asked is None))
        if named is not None and kept is not None:
            talk.resume(named, kept)
        if system is not None:
            talk.conversation.system = system
        talk.attach_images(pictures)
        if asked is None:
            converse(talk, keep=config.history, greet=not as_json)
        elif talk.ask(asked):
            raise KeyboardInterrupt


def _question(argument: str | None) -> str | None:
    """Return the question of the command line and pipe, or None for a conversation. Raises UsageError."""
    from rest_local.cli.chat.conversation import Attachment, with_attachments

    asked = "" if argument in (None, "-") else inputs.clean(argument or "", "question")
    if sys.stdin.isatty():
        if argument == "-":
            return inputs.read_stdin()
        return asked if asked.strip() else None
    piped = inputs.read_stdin().replace("\r\n", "\n")
    if not asked.strip() and not piped.strip():
        raise click.UsageError("the standard input is empty; give a QUESTION")
    if not asked.strip():
        return piped.rstrip()
    return with_attachments(asked, [Attachment("", piped)] if piped.strip() else [])


def _open(config: EngineConfig, template: str | None, live: Live) -> Engine:
    """Open an engine whose model can chat, with this template if there is one. Raises ModelError."""
    engine = opening.open_engine(config, live)
    try:
        if template is not None:
            engine.model.chat_template = template
        way_out = "complete text with `rest-local generate`, give the template with --chat-template-file, "
        opening.require_template(engine, "chat", f"{way_out}or another model with -m")
    except BaseException:
        engine.close()
        raise
    return engine


def converse(talk: Talk, *, keep: bool, greet: bool) -> None:
    """Read messages and answer them until the user leaves. Ctrl-C twice at an empty line raises KeyboardInterrupt."""
    from rest_local.catalog.stores import name_of
    from rest_local.cli.chat.commands import Leave, completions, perform
    from rest_local.cli.chat.prompt import Prompt
    from rest_local.cli.chat.talk import note

    if greet:
        note(f"{name_of(talk.engine.model.path)}: /help for help, /bye to leave")
    prompt = Prompt(completions, keep)
    warned = False
    while True:
        indexer.show_news()
        try:
            text = prompt.ask()
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            interrupt.reset()
            note("/bye or Ctrl-D leaves, and so does another Ctrl-C")
            continue
        warned = False
        if text is None:
            return
        try:
            if text.strip():
                perform(talk, text, prompt.interrupted)
        except Leave:
            return
        except KeyboardInterrupt:  # It came while a command ran.
            interrupt.reset()
            note("stopped")
