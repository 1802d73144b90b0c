"""`rest-local generate`: print the continuation of one prompt as it is generated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import inputs, opening, options
from rest_local.cli.sections import SectionedCommand, option
from rest_local.cli.terminal import REPEATS, json_option, line_of, say, write_text
from rest_local.decoding.config import EngineConfig

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result
    from rest_local.grammar.grammar import Grammar

UNLIMITED = 2**31 - 1  # The answer ends by itself, or when the context is full.


@click.command(cls=SectionedCommand)
@click.argument("prompt", required=False, metavar="[PROMPT | -]")
@options.engine_options
@options.history_option
@options.tokens_option(256, "Generate at most N tokens. -1 goes on until the answer ends or the context is full.")
@option(
    "--instruct",
    "Give PROMPT to the model as a message of the user, in its chat template.",
)
@option(
    "--prediction FILE", "Text that the answer may repeat, such as the old file of an edit; - reads the standard input."
)
@options.sampling_options
@options.stop_option
@options.quiet_option
@json_option
def generate(
    prompt: str | None,
    config: EngineConfig,
    grammar: Grammar | None,
    tokens: int,
    instruct: bool,
    prediction: Path | None,
    stop: tuple[str, ...],
    quiet: bool,
    as_json: bool,
) -> None:
    """Continue PROMPT (or the standard input) and print the continuation as it is generated.

    At a terminal the last line, on stderr, is about the speed: how it compares with plain decoding, and how much of the
    text was drafted from which source.
    """
    predicted = inputs.read_prediction(prediction, prompt)
    text = inputs.read_prompt(prompt)
    with opening.open_engine(config) as engine:
        stream = engine.generate(
            engine.chat_prompt([{"role": "user", "content": text}]) if instruct else text,
            max_tokens=UNLIMITED if tokens < 0 else tokens,
            sampling=engine.sampling(grammar=grammar),
            stop=stop,
            prediction=predicted,
        )
        printed = 0
        try:
            for piece in stream:
                printed += len(piece.text)
                if not as_json:
                    write_text(piece.text)
        except KeyboardInterrupt:
            stream.cancel()
            _finish(engine, stream.result, printed, tokens, quiet, as_json)
            raise
        _finish(engine, stream.result, printed, tokens, quiet, as_json)


def _finish(engine: Engine, result: Result, printed: int, most: int, quiet: bool, as_json: bool) -> None:
    """Print the JSON, or the rest of the text (a possible stop string is held back) and at a terminal the speed."""
    if as_json:
        click.echo(result.to_json())
        return
    write_text(result.text[printed:] + "\n" * (not result.text.endswith("\n")))
    if result.loop:
        say(f"rest-local: {REPEATS}")
    if not result.text and result.finish_reason == "stop":
        say("rest-local: the model gave an empty answer")
    if result.finish_reason == "length" and not 0 <= most <= result.timings.predicted_tokens:
        say("rest-local: the answer was cut off: the context is full (--ctx)")
    if result.tokens and not quiet and sys.stderr.isatty():
        say(line_of(engine, result))
