"""What the tests of tool formats share: the smallest template of each format, and parameters of a tool."""

from typing import Any

from rest_local.chat.tools.answer import _SIGNS

SIGNS = {form.name: " ".join(signs) for signs, form in reversed(_SIGNS)}
FORMATS = sorted(SIGNS)
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"}, "mode": {"enum": ["w", "a"]}, "lines": {"type": "array", "items": {"type": "integer"}},
    "force": {"type": "boolean"}, "count": {"type": "integer"},
}  # fmt: skip
