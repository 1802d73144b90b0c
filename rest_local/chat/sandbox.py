"""Jinja as chat templates expect it, in its immutable sandbox.

Contract: a template reaches no Python internals and changes none of its arguments. Time and memory are bounded only by
the process that renders (`rest_local.chat.renderer`). The rules are those of transformers'
`utils/chat_template_utils.py`: trim_blocks, lstrip_blocks, loop controls, `generation`, raise_exception, tojson.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rest_local.errors import TemplateFailed

MAX_REPEAT = 1 << 20  # length of a repeated text or list; no chat template needs a longer one


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's tokens for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses `'x' * 10**9` and the like, which would exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            too_long = (
                isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_REPEAT
            )
            if too_long or (operator == "**" and isinstance(times, (int, float)) and abs(times) > 64):
                raise jinja2.TemplateRuntimeError(f"{operator} gives too large a result")
        return super().call_binop(context, operator, left, right)


def render_here(template: str, names: Mapping[str, Any]) -> str:
    """Renders in this process. Raises TemplateFailed, and TypeError for a value that the template misuses."""
    try:
        return _compiled(template).render(names)
    except jinja2.TemplateError as error:
        raise TemplateFailed(error.message or type(error).__name__) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise TemplateFailed(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    return environment.from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
