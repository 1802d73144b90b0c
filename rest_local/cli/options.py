"""What several commands share: the options of engine and sampling, how -m and -d are resolved, and how input is read.

Options are gathered into frozen dataclasses, so that a command receives `engine_choice` and `sampling_choice` instead
of twenty arguments. Every command gets its engine from `load_engine`, and nowhere else.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli.load_options import LayerCount, load_options
from rest_local.cli.sections import in_section
from rest_local.errors import DatastoreCorrupt, DatastoreError, InputInvalid, OptionError, printable
from rest_local.llama.options import ModelOptions

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.grammar import Grammar
    from rest_local.llama.sampling import Sampling

Command = Callable[..., Any]

POLICY_NAMES = ("auto", "off", "rest", "sam", "respec")  # rest_local.planning.policies, whose import would cost --help


@dataclass(frozen=True)
class EngineChoice:
    """Which engine: the fields are the options of the same names. `history`, `slots`, `cells`: only where a
    command has the option; `options`: those of `rest_local.cli.load_options`.
    """

    model: str | None = None
    datastore: tuple[str, ...] = ()
    ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    policy: str = "auto"
    exact: bool = False
    history: bool = False
    verify: str = "strict"
    context_shift: bool = False
    slots: int = 1
    cells: int | None = None
    draft_model: str | None = None
    draft_gpu_layers: int | None = None
    options: ModelOptions = field(default_factory=ModelOptions)


@dataclass(frozen=True)
class SamplingChoice:
    """The sampler chain as given on the command line. `build()` checks it."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar_file: Path | None = None
    json_schema: Path | None = None

    def build(self) -> Sampling:
        """Return the `Sampling`. Raises OptionError for a value out of range, InputInvalid for a file that is none."""
        from rest_local.llama.sampling import Sampling

        return Sampling(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        if self.grammar_file is not None and self.json_schema is not None:
            raise OptionError("--grammar-file and --json-schema: give one of them")
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        return None if self.grammar_file is None else file_grammar(self.grammar_file)


def file_grammar(path: Path) -> Grammar:
    """The grammar in a file: Lark where its name ends in `.lark`, else GBNF. Raises InputInvalid."""
    from rest_local.grammar import gbnf, lark

    text = read_text(path, "grammar file")
    try:
        return lark(text) if path.suffix == ".lark" else gbnf(text)
    except OptionError as error:
        raise InputInvalid("grammar file", path, str(error)) from error


def schema_grammar(path: Path) -> Grammar:
    """The grammar of a JSON schema file. Raises InputInvalid."""
    import json

    from rest_local.grammar import json_schema

    text = read_text(path, "JSON schema")
    try:
        return json_schema(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputInvalid("JSON schema", path, f"no JSON: {error}") from error
    except OptionError as error:
        raise InputInvalid("JSON schema", path, str(error)) from error


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file named by an option, given as `what`. Raises InputInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputInvalid(what, path, f"not UTF-8 text at byte {error.start}") from error
    except OSError as error:
        raise InputInvalid(what, path, error.strerror or str(error)) from error


def _parse_biases(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """TOKEN=BIAS, a token id and what is added to its logit; -inf forbids the token."""
    pairs = []
    for value in values:
        token, _, bias = value.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not TOKEN=BIAS, for example 15=-1.5 or 15=-inf") from None
    return tuple(pairs)


def _check_stops(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """The empty text is everywhere: a typing mistake, or an unset variable of a script."""
    if "" in values:
        raise click.BadParameter("give some text to stop before, not an empty one")
    return tuple(values)


_engine, _sampling = in_section("Engine"), in_section("Sampling")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def device_options(option: Callable[..., Decorator]) -> tuple[Decorator, Decorator]:
    """`-t` and `-ngl`, made by `option`: `click.option` or one of a section."""
    return (
        option(
            "-t",
            "--threads",
            type=click.IntRange(min=1),
            metavar="N",
            help="CPU threads, a fixed number. Default: the performance cores, fewer while other programs want them.",
        ),
        option(
            "-ngl",
            "--gpu-layers",
            "--n-gpu-layers",
            type=LayerCount(),
            metavar="N|all|auto",
            help="Layers on the GPU. Default: auto, all where there is a GPU.",
        ),
    )


_ENGINE_OPTIONS = (
    _engine("-m", "--model", metavar="MODEL", help="GGUF file. Default: the demo model."),
    _engine(
        "-d",
        "--datastore",
        multiple=True,
        metavar="DATASTORE",
        help="Name or path of a datastore to draft from; may be repeated. Default: the one named 'default', if any.",
    ),
    _engine(
        "-c",
        "--ctx",
        "--ctx-size",
        type=click.IntRange(min=0),
        metavar="N",
        help="Context in tokens; 0: what the model was trained for. Default: that or 4096, whichever is less.",
    ),
    *device_options(_engine),
    _engine(
        "--policy",
        type=click.Choice(POLICY_NAMES),
        default="auto",
        show_default=True,
        help="When to draft: where it pays, never, or as a paper does.",
    ),
    _engine(
        "-md",
        "--draft-model",
        metavar="FILE",
        help="GGUF of a smaller model of the same family: what it would say is drafted as well, where that pays.",
    ),
    _engine(
        "-ngld",
        "--draft-gpu-layers",
        type=LayerCount(),
        metavar="N|all|auto",
        help="Its layers on the GPU. Default: auto, as with -ngl.",
    ),
    _engine(
        "--verify",
        default="strict",
        show_default=True,
        metavar="strict|relaxed[:K,RATIO]",
        help="Relaxed changes the output: a retrieved token passes among the K likeliest with RATIO of the greatest "
        "probability (3,0.3).",
    ),
    _engine(
        "--context-shift",
        is_flag=True,
        help="When the context is full, go on without the oldest text after the system prompt; else the answer ends.",
    ),
    _engine("--exact", is_flag=True, help="Settings in which drafting changes no bit of any logit; slower."),
)

_SAMPLING_OPTIONS = (
    _sampling("--temp", type=float, default=0.0, show_default=True, metavar="T", help="Temperature; 0 is greedy."),
    _sampling("--top-k", type=int, default=40, show_default=True, metavar="K", help="Sample among the K likeliest."),
    _sampling("--top-p", type=float, default=0.95, show_default=True, metavar="P", help="Nucleus sampling."),
    _sampling(
        "--min-p", type=float, default=0.05, show_default=True, metavar="P", help="Least share of the top probability."
    ),
    _sampling("--seed", type=int, metavar="N", help="Seed of the draws. Default: another one every time."),
    _sampling("--repeat-penalty", type=float, default=1.0, show_default=True, metavar="X", help="1 is none."),
    _sampling(
        "--repeat-last-n",
        type=int,
        default=64,
        show_default=True,
        metavar="N",
        help="Tokens that the penalties look back at.",
    ),
    _sampling("--presence-penalty", type=float, default=0.0, show_default=True, metavar="X", help="0 is none."),
    _sampling("--frequency-penalty", type=float, default=0.0, show_default=True, metavar="X", help="0 is none."),
    _sampling(
        "--logit-bias",
        multiple=True,
        callback=_parse_biases,
        metavar="TOKEN=BIAS",
        help="Add BIAS to the logit of a token id; may be repeated.",
    ),
    _sampling(
        "--grammar-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Grammar that the answer must follow: Lark in a FILE.lark, else GBNF.",
    ),
    click.option(
        "--json-schema",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="JSON schema that the answer must be valid for.",
    ),
)

history_option = _engine(
    "--history/--no-history",
    default=True,
    show_default=True,
    help="Draft from this model's earlier answers, and keep this one on disk for later (`rest-local history`).",
)
stop_option = click.option(
    "--stop", multiple=True, callback=_check_stops, metavar="TEXT", help="Stop before this text; may be repeated."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead.")


def _gather(
    kind: type[Any], argument: str, options: Sequence[Callable[[Command], Command]]
) -> Callable[[Command], Command]:
    """Return a decorator that adds `options` and hands their values over as one `kind`, the argument `argument`."""
    names = [field.name for field in fields(kind)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def gathered(**values: Any) -> Any:
            values[argument] = kind(**{name: values.pop(name) for name in names if name in values})
            return command(**values)

        command_with_options: Command = gathered
        for option in reversed(options):
            command_with_options = option(command_with_options)
        return command_with_options

    return decorate


_engine_options = _gather(EngineChoice, "engine_choice", _ENGINE_OPTIONS)
sampling_options = _gather(SamplingChoice, "sampling_choice", _SAMPLING_OPTIONS)


def engine_options(command: Command) -> Command:
    """Add the options of the engine and of loading its model; the argument is `engine_choice`. Give such a command
    `cls=SectionedCommand`, so that its help stays readable.
    """

    @functools.wraps(command)
    def merged(*, engine_choice: EngineChoice, load: ModelOptions, **values: Any) -> Any:
        return command(engine_choice=replace(engine_choice, options=load), **values)

    return _engine_options(load_options(merged))


def warn(message: str) -> None:
    """One line on stderr. What it quotes may come from a file: control characters do not reach the terminal."""
    click.echo(f"rest-local: warning: {printable(message)}", err=True)


def model_path(value: str | None) -> Path:
    """Return the file that -m names, the demo model without one. Existence is the model's to check."""
    from rest_local.paths import demo_model

    return demo_model() if value is None else Path(value).expanduser()


def load_engine(choice: EngineChoice) -> Engine:
    """Load model and datastores, print the engine's warnings, and return it; the caller closes it.

    A datastore that was asked for must exist, in this format and for this vocabulary; one that is damaged is left out
    with a warning, since it could only have made the answer faster. The default datastore is left out with a warning
    whatever is wrong with it. Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.cli import log

    log.show_warnings()
    engine = _load_undamaged(choice) if choice.datastore else _load_with_default(choice)
    for warning in engine.warnings:
        warn(warning)
    return engine


def _load_with_default(choice: EngineChoice) -> Engine:
    from rest_local.retrieval.home import DEFAULT_NAME

    if choice.policy == "off" or not _has_default():
        return _load(choice)
    try:
        return _load(replace(choice, datastore=(DEFAULT_NAME,)))
    except DatastoreError as error:
        warn(f"the default datastore is not used: {error}")
        return _load(choice)


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False


def _load_undamaged(choice: EngineChoice) -> Engine:
    from rest_local.retrieval.home import datastore_path

    while True:
        try:
            return _load(choice)
        except DatastoreCorrupt as error:
            damaged = os.fspath(error.path)
            others = tuple(name for name in choice.datastore if os.fspath(datastore_path(name)) != damaged)
            if others == choice.datastore:
                raise
            warn(f"{error}; going on without it")
            choice = replace(choice, datastore=others)


def _load(choice: EngineChoice) -> Engine:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.verify import Relaxed
    from rest_local.retrieval.home import datastore_path

    return Engine.load(
        model_path(choice.model),
        datastores=[datastore_path(name) for name in choice.datastore],
        policy=choice.policy,
        verify=Relaxed.parse(choice.verify),
        context_shift=choice.context_shift,
        n_ctx="trained" if choice.ctx == 0 else choice.ctx,
        threads=choice.threads,
        n_gpu_layers=choice.gpu_layers,
        exact=choice.exact,
        history=choice.history,
        slots=choice.slots,
        cells=choice.cells,
        draft_model=Path(choice.draft_model).expanduser() if choice.draft_model else None,
        draft_gpu_layers=choice.draft_gpu_layers,
        options=choice.options,
    )


def clean(text: str, origin: str) -> str:
    """Return `text` with what was not UTF-8 (Python marks it with lone surrogates) as U+FFFD, warning if any was."""
    return decode(text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "replace"), origin)


def _is_escaped(text: str) -> bool:
    """Every surrogate stands for one undecodable byte."""
    return all(0xDC80 <= ord(c) <= 0xDCFF for c in text if 0xD800 <= ord(c) <= 0xDFFF)


def decode(data: bytes, origin: str) -> str:
    """Return UTF-8 `data` as text, invalid bytes as U+FFFD with one warning that names `origin`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        warn(f"{origin}: not UTF-8 at byte {error.start}; invalid bytes were replaced")
        return data.decode("utf-8", "replace")


def read_prediction(path: Path | None, prompt: str | None) -> str:
    """Return the text of --prediction: of a file, of stdin for "-". Raises InputInvalid, and click.UsageError where the
    prompt comes from there.
    """
    if path is None:
        return ""
    if str(path) != "-":
        return read_text(path, "prediction")
    if prompt in (None, "-"):
        raise click.UsageError("the prompt and --prediction - cannot both be the standard input")
    return decode(sys.stdin.buffer.read(), "stdin")


def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, or all of stdin for "-" and for none at all. Raises click.UsageError."""
    if argument not in (None, "-"):
        return clean(argument or "", "prompt")
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or - to read it from the standard input")
    return decode(sys.stdin.buffer.read(), "stdin")
