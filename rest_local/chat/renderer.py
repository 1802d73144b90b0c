"""Render the chat template of a model: messages in, prompt text out, as Hugging Face's `apply_chat_template` does.

Templates come with model files, which are not trusted. So Jinja's sandbox renders them in a child process
(`rest_local.sandbox`): a template that loops or allocates without end costs only the child. It has `MEMORY` bytes of
address space, and `SECONDS` of processor time for a template. Requests to the child are pickles, because this process
writes them; answers are JSON, because a template may have taken over the child.

A chat of 20 messages takes 0.28 ms; in this process it took 0.06 ms.

The sandbox is Jinja's immutable one, with what chat templates expect. A template reaches no Python internals and
changes none of its arguments. The rules are those of transformers' `utils/chat_template_utils.py`: trim_blocks,
lstrip_blocks, loop controls, `generation`, raise_exception, tojson.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rest_local import sandbox
from rest_local.errors import TemplateFailed, TemplateTooCostly
from rest_local.sandbox import WAIT, Worker

# Processor time for one template, because a child that waits on a busy machine has done nothing wrong. The largest
# conversation that the server accepts (8 MB) renders in well under one second.
SECONDS = 5.0
WAIT_SECONDS = WAIT * SECONDS  # wall-clock time, which also bounds a template that has taken over the child
MEMORY = 1 << 30
MAX_TEXT = 1 << 26  # characters of a rendered prompt
MAX_REPEAT = 1 << 20  # length of a repeated text or list; no chat template needs a longer one


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str | None,
    eos: str | None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt for a conversation. It spells special tokens: tokenize with special=True, add_special=False.

    `messages` are dicts with `role` and `content`, and what else the template reads. `bos` and `eos` are the texts of
    the vocabulary's start and end tokens, if it has them. `variables` are further names for the template, such as
    enable_thinking.

    As in llama-server, `enable_thinking` is True unless it is given, and `date_string` and `datetime` are today. Some
    templates take tools as `functions`, in JSON.

    Raises TemplateFailed if the template is not valid Jinja, refuses the messages or does what the sandbox forbids;
    TemplateTooCostly if it exceeds a limit of time or memory; ServiceClosed if the thread is stopped.
    """
    today = datetime.now()
    names: dict[str, Any] = {
        "enable_thinking": True,
        "date_string": today.strftime("%d %b %Y"),
        "datetime": today.strftime("%b %d %Y"),
        "functions": json.dumps(tools) if tools else "",
    }
    names |= {**(variables or {}), "messages": list(messages), "tools": tools, "documents": None}
    names |= {"bos_token": bos or "", "eos_token": eos or "", "add_generation_prompt": add_generation_prompt}
    try:
        return render_limited(template, names)
    except TypeError as error:
        if tools is not None:
            raise TemplateFailed(f"TypeError: {error}") from error
    try:  # some templates loop over `tools` without a check that there are any
        return render_limited(template, names | {"tools": []})
    except TypeError as error:
        raise TemplateFailed(f"TypeError: {error}") from error


_worker = Worker(__name__)


def render_limited(template: str, names: Mapping[str, Any], worker: Worker = _worker) -> str:
    """Return the text that the child renders. Raises what `render` raises, and a TypeError of the template."""
    request = pickle.dumps((template, dict(names)))
    try:
        answer = json.loads(worker.ask(request, SECONDS, WAIT_SECONDS, 8 * MAX_TEXT))
    except sandbox.NotStarted as error:
        raise TemplateFailed(f"it is rendered in a child process: {error}") from error
    except sandbox.TookTooLong:
        raise TemplateTooCostly(f"it takes longer than {min(SECONDS, WAIT_SECONDS):g} s") from None
    except (sandbox.Died, ValueError, RecursionError):
        raise TemplateTooCostly(f"it ended the process that renders it (memory: {MEMORY >> 20} MB)") from None
    if "text" in answer:
        return str(answer["text"])
    kind, cause = answer.get("kind"), str(answer.get("cause"))
    if kind == "TypeError":
        raise TypeError(cause)
    raise TemplateTooCostly(cause) if kind == "limit" else TemplateFailed(cause)


# The rest of this module runs in the child.


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}` for training, which has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses `'x' * 10**9` and the like, which would exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            too_long = (
                isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_REPEAT
            )
            if too_long or (operator == "**" and isinstance(times, (int, float)) and abs(times) > 64):
                raise jinja2.TemplateRuntimeError(f"{operator} gives too large a result")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=lambda format: datetime.now().strftime(format))
    return environment.from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _answer(request: bytes) -> bytes:
    template, names = pickle.loads(request)
    answer: dict[str, str] = {}
    try:
        text = _compiled(template).render(names)
        answer = {"text": text}
        if len(text) > MAX_TEXT:
            answer = {"kind": "limit", "cause": f"its text has more than {MAX_TEXT} characters"}
    except MemoryError:
        answer = {"kind": "limit", "cause": f"it takes more than {MEMORY >> 20} MB of memory"}
    except TypeError as error:
        answer = {"kind": "TypeError", "cause": str(error)[:1000]}
    except jinja2.TemplateError as error:
        answer = {"cause": (error.message or type(error).__name__)[:1000]}
    except Exception as error:
        answer = {"cause": f"{type(error).__name__}: {error}"[:1000]}
    return json.dumps(answer).encode()


if __name__ == "__main__":
    sandbox.serve(_answer, MEMORY)
