"""`rest-local generate`: one prompt in, its continuation out, as it is generated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import inputs, opening, options
from rest_local.cli.sections import SectionedCommand
from rest_local.decoding.config import EngineConfig
from rest_local.llama.sampling import Sampling

if TYPE_CHECKING:
    from rest_local.decoding.engine import Result


@click.command(cls=SectionedCommand)
@click.argument("prompt", required=False, metavar="[PROMPT | -]")
@options.engine_options
@options.history_option
@click.option(
    "-n",
    "--tokens",
    "--n-predict",
    "--predict",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    metavar="N",
    help="Generate at most N tokens.",
)
@click.option(
    "--prediction",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text that the answer may repeat, such as the old file of an edit; - reads the standard input.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Tokens of the prompt that --context-shift keeps.",
)
@options.sampling_options
@options.stop_option
@options.json_option
def generate(
    prompt: str | None,
    config: EngineConfig,
    sampling: Sampling,
    tokens: int,
    prediction: Path | None,
    keep: int,
    stop: tuple[str, ...],
    as_json: bool,
) -> None:
    """Continue PROMPT (or the standard input) and print the continuation as it is generated."""
    predicted = inputs.read_prediction(prediction, prompt)
    text = inputs.read_prompt(prompt)
    with opening.open_engine(config) as engine:
        stream = engine.generate(
            text, max_tokens=tokens, sampling=sampling, stop=stop, prediction=predicted, keep_tokens=keep
        )
        printed = 0
        try:
            for piece in stream:
                printed += len(piece.text)
                if not as_json:
                    click.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            stream.cancel()
            _finish(stream.result, printed, as_json)
            raise
        _finish(stream.result, printed, as_json)


def _finish(result: Result, printed: int, as_json: bool) -> None:
    """Print the last line: the JSON, or the end of the text. After an interrupt that is also the text that was held
    back because it could have become a stop string.
    """
    if as_json:
        click.echo(result.to_json())
        return
    rest = result.text[printed:]
    click.echo(rest, nl=not result.text.endswith("\n"))
