"""Anthropic's tools as OpenAI's.

- A tool with a schema of its own is translated.
- Tools that Anthropic defines and the client runs (`bash_*`, `text_editor_*`, `memory_*`) have no schema in a request:
  Anthropic's models were trained with it. Other models get it here, and the client gets the calls that it expects.
- Tools that Anthropic's servers run (search, fetch, code execution) cannot run here. They are left out where other
  tools are offered, because agents offer them to every model. A request that has no other tool, or that forces one of
  them, is refused: its client would take what the model makes up for the result of a search.
- `computer_*`, toolsets and any other type are refused: they need what local models were not trained for.
- `defer_loading` is ignored: all tools are offered from the start, so a search among them (`tool_search_*`) finds
  nothing that was not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rest_local.server.bodies import JsonObject
from rest_local.server.errors import ApiError
from rest_local.server.messages.bodies import ToolChoice

_RUN_THERE = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
_PATH = {"type": "string", "description": "Absolute path of a file or directory."}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: the first and the last line, from 1 on; -1 for the end of the file.",
}


def wrong(place: str, text: str) -> ApiError:
    """An error at a place of the body, `messages[2].content[0].type`."""
    return ApiError(400, f"{place}: {text}", code="invalid_value", param=place.partition("[")[0].partition(".")[0])


def openai_tools(tools: Sequence[JsonObject], choice: ToolChoice | None) -> list[JsonObject]:
    """The tools that are offered. Raises ApiError 400, which names the place."""
    offered, left_out = [], {}
    for number, tool in enumerate(tools):
        place, kind, name = f"tools[{number}]", tool.get("type") or "custom", tool.get("name")
        if not isinstance(kind, str):
            raise wrong(f"{place}.type", "give text")
        if kind.startswith(_RUN_THERE):
            left_out[name if isinstance(name, str) else kind] = (place, kind)
        elif not isinstance(name, str) or not name:
            raise wrong(f"{place}.name", "give a name")
        else:
            offered.append(_function(tool, kind, name, place))
    wanted = choice.name if choice is not None and choice.type == "tool" else None
    if left_out and (not offered or wanted in left_out):
        place, kind = left_out.get(wanted or "") or next(iter(left_out.values()))
        raise wrong(f"{place}.type", f"{kind[:64]} runs on Anthropic's servers, not on this one")
    return offered


def openai_choice(choice: ToolChoice | None, offered: Sequence[JsonObject]) -> Any:
    """OpenAI's `tool_choice`. Raises ApiError 400 for a tool that is not offered."""
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if not offered:
        raise wrong("tool_choice", "a call is forced, but no tools are given")
    if choice.type == "any":
        return "required"
    if choice.name not in {tool["function"]["name"] for tool in offered}:
        raise wrong("tool_choice.name", "no tool has this name")
    return {"type": "function", "function": {"name": choice.name}}


def _function(tool: JsonObject, kind: str, name: str, place: str) -> JsonObject:
    if kind == "custom":
        description, schema = tool.get("description") or "", tool.get("input_schema")
        if not isinstance(description, str):
            raise wrong(f"{place}.description", "give text")
        if not isinstance(schema, dict):
            raise wrong(f"{place}.input_schema", "give a JSON schema")
    else:
        description, schema = _known(kind, place)
    function: JsonObject = {"name": name, "description": description, "parameters": schema}
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _known(kind: str, place: str) -> tuple[str, JsonObject]:
    """Description and schema of a tool that Anthropic defines and clients run."""
    if kind.startswith("bash_"):
        return "Runs a command in a bash shell that keeps its state between calls.", _schema(
            {
                "command": {"type": "string", "description": "The command to run."},
                "restart": {"type": "boolean", "description": "True to start the shell anew, without a command."},
            }
        )
    if kind.startswith("text_editor_"):
        return "Views, creates and edits text files.", _editor(kind)
    if kind.startswith("memory_"):
        return "Keeps notes in files below /memories, which outlive the conversation.", _memory()
    raise wrong(f"{place}.type", f"tools of type {kind[:64]!r} are not supported")


def _editor(kind: str) -> JsonObject:
    """Before 20250429 an edit could be undone; before 20250728 `new_str` was also what is inserted."""
    date = kind.removeprefix("text_editor_")
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if date < "20250429" else [])]
    inserts = "insert_text" if date >= "20250728" else "new_str"
    fields: JsonObject = {
        "command": {"type": "string", "enum": commands},
        "path": _PATH,
        "view_range": _LINES,
        "file_text": {"type": "string", "description": "For create: the text of the file."},
        "old_str": {"type": "string", "description": "For str_replace: text that occurs once in the file."},
        "new_str": {"type": "string", "description": "For str_replace: the text in its place."},
        "insert_line": {"type": "integer", "description": f"For insert: the line after which {inserts} goes."},
    }
    if inserts == "insert_text":
        fields["insert_text"] = {"type": "string", "description": "For insert: the text."}
    return _schema(fields, "command", "path")


def _memory() -> JsonObject:
    text = {"type": "string"}
    fields: JsonObject = {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        "path": {"type": "string", "description": "A path below /memories; for rename use old_path and new_path."},
        "view_range": _LINES,
        "file_text": text,
        "old_str": text,
        "new_str": text,
        "insert_line": {"type": "integer"},
        "insert_text": text,
        "old_path": text,
        "new_path": text,
    }
    return _schema(fields, "command")


def _schema(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}
