"""Make the engine's request from a checked body: the tokens of its prompt, sampling, grammar.

The names and defaults of OpenAI and llama-server get one meaning. A prompt is a conversation, plain text, token ids, or
a gap to fill. Special tokens are recognized in plain prompts, because clients build prompts with them, but not in the
text around a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rest_local.api.bodies import MAX_PROMPTS, Extension, GenerationBody, PromptField
from rest_local.api.errors import ApiError
from rest_local.api.next_edit import window_of
from rest_local.chat.conversation import ChatTemplate, content_text
from rest_local.decoding.chat import chat_template
from rest_local.decoding.request import STRICT, Request
from rest_local.decoding.verify import Relaxed
from rest_local.errors import CannotGenerate, OptionError, PromptTooLong
from rest_local.grammar import Grammar, any_object, gbnf, json_schema, lark
from rest_local.llama.options import INFILL, MAX_SEED, NUMBERS, Sampling
from rest_local.llama.sampling_defaults import sampler_order

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.llama.projector import ImageChunk
    from rest_local.llama.vocabulary import Vocabulary


_WIDE = 2**31 - 1


def request_of(
    engine: Engine,
    body: GenerationBody,
    prompt: Sequence[int],
    *,
    images: Sequence[ImageChunk] = (),
    logprobs: int | None = None,
    grammar: Grammar | None = None,
    choice: int = 0,
    asks: object = "",
) -> Request:
    """Make the engine's request. Raises OptionError for a value out of range.

    The placeholders in the prompt stand for `images`. `choice` numbers the answers to one prompt, which draw with
    different seeds.
    If `asks`, the prompt or the last message, is a text that asks for a next edit, the current window is the
    prediction, and decoding is greedy unless the body has a temperature or a prediction.
    """
    window = window_of(asks) if isinstance(asks, str) and not body.prediction else ""
    extension = body.rest_local or Extension()
    room, most = max(engine.n_ctx - len(prompt), 0), engine.n_ctx
    names = ("max_completion_tokens", "max_tokens", "n_predict")
    wanted = next((value for name in names if (value := getattr(body, name, None)) is not None), -1)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stores = [body.datastore] if isinstance(body.datastore, str) else body.datastore
    return engine.request(
        prompt,
        images=images,
        max_tokens=room if wanted < 0 else min(wanted, most),  # llama-server's -1 and -2 mean as many as fit
        sampling=_sampling(body, engine, grammar, choice, greedy=bool(window)),
        stop=tuple(filter(None, stops)),
        stop_tokens=tuple(body.stop_token_ids or ()),
        min_tokens=min(max(body.min_tokens or 0, 0), most),
        ignore_end=bool(body.ignore_eos),
        prediction=content_text(body.prediction.content, ("prediction", "content")) if body.prediction else window,
        logprobs=logprobs,
        origins=bool(extension.origins),
        progress=bool(body.stream and body.return_progress),
        policy=extension.policy,
        verify=None if extension.verify is None else Relaxed.parse(extension.verify) or STRICT,
        datastores=None if stores is None else tuple(stores),
        keep_prefix=body.cache_prompt is not False,
        session=body.prompt_cache_key or "",
    )


def _sampling(
    body: GenerationBody, engine: Engine, grammar: Grammar | None, choice: int, *, greedy: bool = False
) -> Sampling:
    """Return the sampling that the body requests, with the engine's defaults. A seed of -1 means none.

    With `greedy` the default temperature is 0.
    """
    named = {name: value for name in NUMBERS if (value := getattr(body, name)) is not None}
    if greedy:
        named.setdefault("temperature", 0.0)
    if body.samplers is not None:
        samplers = sampler_order(body.samplers)
        if INFILL in samplers and body.temperature is None:
            # The infill sampler keeps tokens with a fifth of the mass or more, which is nearly always one token.
            # Greedy sampling accepts more drafts.
            samplers, named["temperature"] = (*(name for name in samplers if name != INFILL), "temperature"), 0.0
        named["samplers"] = samplers
    for name in ("temperature", "top_k"):
        if name in named:
            named[name] = min(max(named[name], 0), _WIDE)
    if body.dry_sequence_breakers is not None:
        named["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    seed = engine.sampling().seed if body.seed is None else body.seed
    named["seed"] = None if seed is None or seed == -1 else (seed + choice) % (MAX_SEED + 1)
    return engine.sampling(**named, logit_bias=_biases(body, engine.model.vocabulary), grammar=grammar)


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """Return the options in effect under llama-server's names, without the seed."""
    numbers = {name: getattr(sampling, name) for name in NUMBERS if name != "seed"}
    return numbers | {name: list(getattr(sampling, name)) for name in ("dry_sequence_breakers", "samplers")}


def _biases(body: GenerationBody, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's object of ids, or llama-server's list of pairs. Text stands for its tokens, false forbids them."""
    if body.logit_bias is None:
        return ()
    named = isinstance(body.logit_bias, dict)
    pairs = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    found: list[tuple[int, float]] = []
    for token, bias in pairs:
        value = -math.inf if bias is False else bias
        if isinstance(value, (bool, str)):
            raise ApiError(400, "logit_bias: a bias is a number or false", param="logit_bias")
        if isinstance(token, str) and not (named and token.isascii() and token.lstrip("-").isdigit()):
            found += [(int(each), float(value)) for each in vocabulary.tokenize(token)]
            continue
        written = str(token)
        if not (written.isdigit() and len(written) < 11 and int(written) < vocabulary.size):
            raise ApiError(400, f"logit_bias: give token ids below {vocabulary.size}", param="logit_bias")
        found.append((int(written), float(value)))
    return tuple(found)


Schema = dict[str, Any] | bool


def grammar_of(body: GenerationBody) -> Grammar | None:
    """Return the grammar that a body or its JSON schema requests, or None if the answer is not constrained.

    Raises OptionError for a schema or grammar that cannot be used, ApiError 400 if both are given.
    """
    schema = schema_of(body)
    if body.grammar or schema is None:
        return own_grammar(body)
    return any_object() if schema is True or schema == {} else json_schema(schema)


def own_grammar(body: GenerationBody) -> Grammar | None:
    if not body.grammar:
        return None
    return gbnf(body.grammar) if isinstance(body.grammar, str) else lark(body.grammar.value)


def schema_of(body: GenerationBody) -> Schema | None:
    """Return the requested JSON schema, or True for any object. Raises ApiError 400 if there is a grammar as well."""
    schema: Schema | None = body.json_schema
    wanted = body.response_format
    if schema is None and wanted is not None and wanted.type == "json_object":
        schema = True if wanted.schema_ is None else wanted.schema_
    elif schema is None and wanted is not None and wanted.type == "json_schema":
        schema = wanted.json_schema.schema_ if wanted.json_schema else None
        if schema is None:
            raise ApiError(400, "response_format: json_schema needs json_schema.schema", param="response_format")
    if body.grammar and schema is not None:
        raise ApiError(400, "give a grammar or a JSON schema, not both", param="grammar")
    return schema


REPOSITORY = "project"
# As in llama-server, the text before a gap gets this share of the free context if the text after it is long, too.
PREFIX_SHARE = 0.75


def check_generates(engine: Engine) -> None:
    """Raise CannotGenerate for a model that only reads."""
    if not engine.decoder.generates:
        raise CannotGenerate


def template_of(engine: Engine) -> ChatTemplate:
    """Return the model's own template. Raises ApiError 501 if it has none, or CannotGenerate."""
    check_generates(engine)
    if not engine.model.chat_template:
        raise ApiError(501, "the model has no chat template; use /v1/completions", code="no_chat_template")
    return chat_template(engine.model)


def prompts_of(
    engine: Engine,
    prompt: PromptField,
    most: int = MAX_PROMPTS,
    longest: int | None = None,
    field: str = "prompt",
) -> list[list[int]]:
    """Return the token ids of up to `most` prompts, each of at most `longest` tokens.

    A prompt is a text, or ids that may be mixed with texts. Several prompts are a list of these. `field` is their name
    in the body. Raises ApiError 400 for a wrong number of prompts or a list
    among ids, OptionError for an unknown id, and PromptTooLong.
    """
    if isinstance(prompt, str) or any(isinstance(part, int) for part in prompt):
        return [_prompt(engine, prompt, longest, field)]
    if not 1 <= len(prompt) <= most:
        message = f"{field}: give 1 to {most} prompts at once, not {len(prompt)}"
        raise ApiError(400, message, code="invalid_value", param=field)
    return [_prompt(engine, each, longest, field) for each in prompt]  # type: ignore[arg-type]


def _prompt(
    engine: Engine,
    prompt: str | Sequence[int | str | Sequence[int | str]],
    longest: int | None,
    field: str,
) -> list[int]:
    if isinstance(prompt, str):
        return engine.tokenize(prompt, most=longest)
    tokens: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, int):
            tokens += checked_ids(engine, [part])
        elif not isinstance(part, str):
            raise ApiError(400, "give one prompt, of texts and token ids, or a list of such prompts", param=field)
        elif number == 0:
            tokens += engine.tokenize(part, most=longest)
        else:
            tokens += engine.model.vocabulary.tokenize(part, special=True, most=longest).tolist()
        if longest is not None and len(tokens) > longest:
            raise PromptTooLong(len(tokens), longest)
    return tokens


def checked_ids(engine: Engine, ids: Any) -> list[int]:
    """Check token ids. Raises OptionError for an id that the model lacks: llama.cpp would abort the process."""
    size = engine.model.vocabulary.size
    if any(not isinstance(token, int) or not 0 <= token < size for token in ids):
        raise OptionError(f"the prompt contains token ids outside 0..{size - 1}")
    return list(ids)


def prompt_text(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """Return the text of the tokens, including special tokens."""
    return b"".join(map(vocabulary.piece, tokens)).decode("utf-8", "replace")


def infill_tokens(
    engine: Engine, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = (), prompt: str = "", answer: int = 0
) -> list[int]:
    """Return the prompt for a gap in the model's own format, shortened to leave room for `answer` tokens.

    Text far from the gap is dropped first: the first of the `extra` files (name, text), the front of the prefix, the
    end of the suffix. `prompt` is the beginning of the gap's own text. Raises ApiError 501 if the model has no
    fill-in-the-middle tokens.
    """
    vocabulary = engine.model.vocabulary
    markers = vocabulary.ids.fim_prefix, vocabulary.ids.fim_suffix, vocabulary.ids.fim_middle
    if any(marker is None for marker in markers):
        raise ApiError(501, "the model has no fill-in-the-middle tokens", code="no_infill")
    before, after, middle = (int(marker) for marker in markers if marker is not None)
    start = [vocabulary.ids.bos] if vocabulary.ids.add_bos and vocabulary.ids.bos is not None else []
    begun = _ids(vocabulary, prompt)
    room = max(engine.n_ctx - 1 - min(answer, engine.n_ctx // 2) - len(start) - len(begun) - 3, 0)
    left, right = _ids(vocabulary, prefix), _ids(vocabulary, suffix)
    keep = min(len(left), max(int(PREFIX_SHARE * room), room - len(right)))
    left, right = left[len(left) - keep :], right[: room - keep]
    around = _context(vocabulary, extra, room - len(left) - len(right))
    return [*start, *around, before, *left, after, *right, middle, *begun]


def _context(vocabulary: Vocabulary, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Return as many of the last files as fit, marked with repository and file if the model has such tokens."""
    if not extra:
        return []
    repository, separator = vocabulary.ids.fim_rep, vocabulary.ids.fim_sep
    head = [] if repository is None else [repository, *_ids(vocabulary, f"{REPOSITORY}\n")]
    if separator is None:
        parts, tail = [_ids(vocabulary, f"{text}\n") for _, text in extra], []
    else:
        parts = [[separator, *_ids(vocabulary, f"{name or 'tmp'}\n{text}")] for name, text in extra]
        tail = [separator, *_ids(vocabulary, "filename\n")]
    room -= len(head) + len(tail)
    taken: list[list[int]] = []
    for part in reversed(parts):
        room -= len(part)
        if room < 0:
            break
        taken.insert(0, part)
    return [*head, *(token for part in taken for token in part), *tail] if taken else []


def _ids(vocabulary: Vocabulary, text: str) -> list[int]:
    tokens: list[int] = vocabulary.tokenize(text).tolist() if text else []
    return tokens
