"""Makes the engine's request of a checked body: names and defaults of OpenAI and llama-server get one meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rest_local.chat.conversation import content_text
from rest_local.chat.tools import AnswerFormat, Tool
from rest_local.decoding.request import STRICT, Request, Strict
from rest_local.decoding.verify import Relaxed
from rest_local.grammar import Grammar, any_object, gbnf, json_schema, lark
from rest_local.llama.options import MAX_SEED, Sampling
from rest_local.server.bodies import ChatBody, Extension, GenerationBody, NativeBody, Prediction
from rest_local.server.errors import ApiError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.llama.projector import ImageChunk
    from rest_local.llama.vocabulary import Vocabulary

TEMPERATURE = 0.8  # llama-server's default, as are those of `Sampling`
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
    kept: int = 0,
) -> Request:
    """The engine's request.

    images   what the placeholders in the prompt stand for
    choice   number of the answer among several to one prompt; each draws with a seed of its own
    kept     tokens of the prompt that a context shift keeps, unless the body says how many

    Raises OptionError for a value out of range.
    """
    extension = body.rest_local or Extension()
    shifts = shifts_context(engine, body)
    room = _WIDE if shifts else max(engine.n_ctx - len(prompt), 0)
    most = _WIDE if shifts else engine.n_ctx
    wanted = _max_tokens(body)
    return engine.request(
        prompt,
        images=images,
        max_tokens=room if wanted is None else min(wanted, most),
        sampling=_sampling(body, engine.model.vocabulary, grammar, choice),
        stop=_stops(body),
        min_tokens=min(max(body.min_tokens or 0, 0), most),
        ignore_end=bool(body.ignore_eos),
        prediction=_predicted(body.prediction),
        logprobs=logprobs,
        after_sampling=isinstance(body, NativeBody) and bool(body.post_sampling_probs),
        origins=bool(extension.origins),
        progress=bool(body.stream and body.return_progress),
        policy=extension.policy,
        verify=_verify(extension.verify),
        exact=bool(extension.exact),
        datastores=_datastores(body),
        keep_prefix=body.cache_prompt is not False,
        context_shift=bool(extension.context_shift),
        keep_tokens=kept if body.n_keep is None else _kept(body.n_keep, len(prompt)),
        prompt_seconds=_seconds(extension.t_max_prompt_ms),
        session=body.prompt_cache_key or "",
        background=body.service_tier == "flex",
    )


def shifts_context(engine: Engine, body: GenerationBody) -> bool:
    """Whether the answer goes on when the context is full."""
    return engine.config.context_shift or bool(body.rest_local and body.rest_local.context_shift)


def longest_prompt(engine: Engine, body: GenerationBody) -> int | None:
    """The longest prompt in tokens; None if longer ones are shortened."""
    return None if shifts_context(engine, body) else engine.n_ctx


def _max_tokens(body: GenerationBody) -> int | None:
    """None: as many as fit, for which llama-server has -1 and -2."""
    names = [body.max_completion_tokens] if isinstance(body, ChatBody) else []
    given = next((value for value in (*names, body.max_tokens, body.n_predict) if value is not None), -1)
    return None if given < 0 else given


def _sampling(body: GenerationBody, vocabulary: Vocabulary, grammar: Grammar | None, choice: int) -> Sampling:
    """The sampling settings. As in llama-server, `samplers` turns off every sampler that it does not name."""
    samplers = body.samplers if isinstance(body.samplers, list) else None

    def used(name: str, value: Any, default: Any, off: Any) -> Any:
        if samplers is not None and name not in samplers:
            return off
        return default if value is None else value

    defaults = Sampling()
    temperature = used("temperature", body.temperature, TEMPERATURE, 1.0)
    if samplers and "infill" in samplers and body.temperature is None:
        temperature = 0.0  # that sampler keeps only tokens with a fifth of the mass or more: nearly always one
    off = samplers is not None and "penalties" not in samplers
    return Sampling(
        temperature=max(float(temperature), 0.0),
        top_k=min(max(used("top_k", body.top_k, defaults.top_k, 0), 0), _WIDE),
        top_p=used("top_p", body.top_p, defaults.top_p, 1.0),
        min_p=used("min_p", body.min_p, defaults.min_p, 0.0),
        seed=_seed(body.seed, choice),
        repeat_penalty=1.0 if off or body.repeat_penalty is None else body.repeat_penalty,
        repeat_last_n=defaults.repeat_last_n if body.repeat_last_n is None else body.repeat_last_n,
        presence_penalty=0.0 if off else body.presence_penalty or 0.0,
        frequency_penalty=0.0 if off else body.frequency_penalty or 0.0,
        logit_bias=_biases(body, vocabulary),
        grammar=grammar,
    )


def _seed(seed: int | None, choice: int) -> int | None:
    """Any integer is a seed, except -1, which means none as in llama-server."""
    return None if seed is None or seed == -1 else (seed + choice) % (MAX_SEED + 1)


def _biases(body: GenerationBody, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of ids, or llama-server's list of pairs. Text stands for its tokens, false forbids."""
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
            raise ApiError(400, f"logit_bias: ids of tokens are below {vocabulary.size}", param="logit_bias")
        found.append((int(written), float(value)))
    return tuple(found)


def _stops(body: GenerationBody) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(stop for stop in stops if stop)


def _verify(text: str | None) -> Relaxed | Strict | None:
    return None if text is None else Relaxed.parse(text) or STRICT


def _predicted(prediction: Prediction | None) -> str:
    return "" if prediction is None else content_text(prediction.content, "prediction.content")


def _datastores(body: GenerationBody) -> tuple[str, ...] | None:
    if body.datastore is None:
        return None
    return (body.datastore,) if isinstance(body.datastore, str) else tuple(body.datastore)


def _kept(n_keep: int, n_prompt: int) -> int:
    """Tokens to keep; negative for the whole prompt."""
    return n_prompt if n_keep < 0 else min(n_keep, n_prompt)


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1e3 if milliseconds and milliseconds > 0 else None


Schema = dict[str, Any] | bool


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar that a body requests: its own or that of its JSON schema. None where the answer is not constrained.

    Raises OptionError for a schema that cannot be kept and a grammar that cannot be read or compiled, ApiError 400 if
    both are given.
    """
    schema = _schema(body)
    if body.grammar or schema is None:
        return _own_grammar(body)
    return any_object() if schema is True or schema == {} else json_schema(schema)


def chat_grammar(body: ChatBody, form: AnswerFormat, tools: Sequence[Tool], choice: Any, prompt: str) -> Grammar | None:
    """As `grammar_of`, with the reasoning of models that reason in front.

    A forced call takes precedence over a schema, and a schema over calls that the model may choose to make. Raises what
    `grammar_of` raises, and OptionError for an unknown `tool_choice`.
    """
    schema = _schema(body)
    forced = form.forced(tools, choice, prompt, parallel=body.parallel_tool_calls is not False)
    if forced is not None and body.grammar:
        raise ApiError(400, "give a grammar or force a call, not both", param="grammar")
    if forced is not None or body.grammar or schema is None:
        return forced or _own_grammar(body)
    return form.schema(None if schema is True or schema == {} else schema, prompt)


def _own_grammar(body: GenerationBody) -> Grammar | None:
    """The grammar that the body contains."""
    if not body.grammar:
        return None
    return gbnf(body.grammar) if isinstance(body.grammar, str) else lark(body.grammar.value)


def _schema(body: GenerationBody) -> Schema | None:
    """The JSON schema that a body requests; True for any object. Raises ApiError 400 if there is a grammar as well."""
    schema = _given_schema(body)
    if body.grammar and schema is not None:
        raise ApiError(400, "give a grammar or a JSON schema, not both", param="grammar")
    return schema


def _given_schema(body: GenerationBody) -> Schema | None:
    if body.json_schema is not None:
        return body.json_schema
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return wanted.schema_ if wanted.schema_ is not None else True
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(400, "response_format: json_schema needs json_schema.schema", param="response_format")
    return wanted.json_schema.schema_
