"""Chat templates render as in transformers, and cannot leave the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local.chat.renderer import render
from rest_local.errors import TemplateFailed

CONVERSATION = [
    {"role": "user", "content": "What is <2+2>?"},
    {"role": "assistant", "content": "It is 4 & nothing else."},
    {"role": "user", "content": "Danke schön"},
]


def _render(template: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return render(template, CONVERSATION if messages is None else messages, bos="<s>", eos="</s>", **options)


def test_every_collected_template_renders_a_conversation(shared_data: Callable[[str], Path]) -> None:
    templates = sorted(shared_data("templates").glob("*.jinja"))
    assert len(templates) >= 17
    for template in templates:
        text = _render(template.read_text("utf-8"))
        places = [text.find(message["content"]) for message in CONVERSATION]
        assert -1 not in places, template.name
        assert places == sorted(places), template.name
        again = _render(template.read_text("utf-8"), add_generation_prompt=False)
        assert text.startswith(again.rstrip()[:40]), template.name


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% generation %}{{ messages[1].role }}{% endgeneration %}", "assistant"),
        ("{{ {'a': '<ü>'} | tojson }}", '{"a": "<ü>"}'),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ tools is none }}{{ unknown is defined }}", "TrueFalse"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for tool in tools %}x{% endfor %}done", "done"),
        ("{{ '-' * 3 }}{{ 2 ** 3 }}", "---8"),
    ],
)
def test_rules_of_hugging_face(template: str, text: str) -> None:
    assert _render(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ raise_exception.__code__.co_code }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9999999 }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('roles must\nalternate') }}",
        "{% for %}",
        "{{ messages[9].role }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson | nothing }}",
    ],
)
def test_errors_of_the_sandbox_and_the_template_are_one_line(template: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        _render(template)
    assert "\n" not in str(caught.value)
