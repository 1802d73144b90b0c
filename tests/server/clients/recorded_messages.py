"""What agents send to Anthropic's Messages API: fields, roles, block types and headers, with made-up text.

Claude Code (but for `CLAUDE_SIDE`), opencode and Cline were recorded from runs against this server (`test_claude_code`,
`test_opencode_messages`, `test_cline`); Zed was read from its source. `recorded.py` has the rules.
"""

from __future__ import annotations

import json
from typing import Any

from recorded import Recorded

CLAUDE_CODE = "@anthropic-ai/claude-code 2.1.197, recorded from runs against this server"
OPENCODE = "opencode-ai 1.18.33 with @ai-sdk/anthropic, recorded from runs against this server"
CLINE = "cline 3.0.65 (command line), recorded from runs against this server"
ZED = "zed-industries/zed crates/anthropic/src/completion.rs 01bf724"

MARK = {"cache_control": {"type": "ephemeral"}}
PATH = "/work/m.py"
FILE = "1\tdef add(a, b):\n2\t    return a - b\n3\t"
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    schema = {"$schema": SCHEMA, "type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": f"{name} does it.", "input_schema": schema | {"additionalProperties": False}}


WORD, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "exclusiveMinimum": 0}, {"type": "boolean"}
CLAUDE_TOOLS = [
    tool("Agent", "description", "prompt", description=WORD, prompt=WORD, model={"type": "string", "enum": ["opus"]}),
    tool("Bash", "command", command=WORD, timeout={"type": "number"}, run_in_background={**FLAG, "default": False}),
    tool("Edit", "file_path", file_path=WORD, old_string=WORD, new_string=WORD, replace_all={**FLAG, "default": False}),
    tool("Read", "file_path", file_path=WORD, offset=NUMBER, limit=NUMBER, pages=WORD),
    tool("TaskUpdate", "taskId", taskId=WORD, metadata={"type": "object", "propertyNames": WORD}),
    tool("WebFetch", "url", url={"type": "string", "format": "uri"}, prompt=WORD),
    tool("WebSearch", "query", query={"type": "string", "minLength": 2}, allowed_domains={"type": "array"}),
    tool("Write", "file_path", "content", file_path=WORD, content=WORD),
    *(tool(f"Tool{number}", "a", a=WORD, b={"anyOf": [WORD, {"type": "null"}]}) for number in range(14)),
]
CLAUDE_HEADERS = (
    ("user-agent", "claude-cli/2.1.197 (external, sdk-cli)"),
    (
        "anthropic-beta",
        "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
        "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,"
        "effort-2025-11-24",
    ),
    ("anthropic-dangerous-direct-browser-access", "true"),
    ("anthropic-version", "2023-06-01"),
    ("x-api-key", "any"),
    ("x-app", "cli"),
    ("x-claude-code-session-id", "09976f26-2221-4356-9f84-4df863c5484c"),
    ("x-stainless-retry-count", "0"),
    ("x-stainless-timeout", "600"),
)
CLAUDE_FIELDS: dict[str, Any] = {
    "model": "demo",
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"),
        text("You are an agent.", **MARK),
        text("\nYou help with software.\n", **MARK),
    ],
    "tools": CLAUDE_TOOLS,
    "metadata": {"user_id": json.dumps({"device_id": 64 * "a", "account_uuid": "", "session_id": "09976f26"})},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_ASKED = [
    {"role": "user", "content": [text("<system-reminder>\nToday.\n</system-reminder>"), text("Fix the sign in m.py")]},
    {"role": "system", "content": "Available agent types: claude."},
]
CLAUDE_READ = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": PATH}}
CLAUDE_START = Recorded(
    "Claude Code",
    CLAUDE_CODE,
    "/v1/messages?beta=true",
    CLAUDE_FIELDS | {"messages": CLAUDE_ASKED},
    CLAUDE_HEADERS,
)
CLAUDE_TURN = Recorded(
    "Claude Code",
    CLAUDE_CODE,
    "/v1/messages?beta=true",
    CLAUDE_FIELDS
    | {
        "messages": [
            *CLAUDE_ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I have to read it.", "signature": "rest-local"},
                    CLAUDE_READ,
                ],
            },
            {"role": "user", "content": [{"tool_use_id": "toolu_1", "type": "tool_result", "content": FILE, **MARK}]},
        ]
    },
    CLAUDE_HEADERS,
)
CLAUDE_SEARCH = Recorded(
    "Claude Code",
    CLAUDE_CODE,
    "/v1/messages?beta=true",
    {name: CLAUDE_FIELDS[name] for name in ("model", "system", "metadata", "max_tokens", "output_config", "stream")}
    | {
        "messages": [{"role": "user", "content": [text("Perform a web search for the query: a sign")]}],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "tool_choice": {"type": "auto"},
    },
    CLAUDE_HEADERS,
)
CLAUDE_SIDE = Recorded(
    "Claude Code",
    "no run sent one: fields as in the others, with a name of the small model from the program's texts",
    "/v1/messages?beta=true",
    {
        "model": "claude-haiku-4-5-20251001",  # needs `--alias '*'`, or ANTHROPIC_DEFAULT_HAIKU_MODEL
        "max_tokens": 512,
        "system": [text("Name the conversation.")],
        "messages": [{"role": "user", "content": [text("Fix the sign in m.py")]}],
        "metadata": CLAUDE_FIELDS["metadata"],
        "stream": True,
    },
    CLAUDE_HEADERS,
)

AI_SDK_HEADERS = (("anthropic-version", "2023-06-01"), ("x-api-key", "any"), ("x-session-id", "ses_dfaea2e73ffe"))
OPENCODE_TITLE = Recorded(
    "opencode",
    OPENCODE,
    "/v1/messages",
    {
        "model": "demo",
        "max_tokens": 8000,
        "system": [text("You generate titles.", **MARK)],
        "messages": [{"role": "user", "content": [text("Generate a title:\n", **MARK), text('"Fix"', **MARK)]}],
        "stream": True,
    },
    AI_SDK_HEADERS,
)
OPENCODE_TURN = Recorded(
    "opencode",
    OPENCODE,
    "/v1/messages",
    {
        "model": "demo",
        "max_tokens": 8000,
        "system": [text("You are opencode.", **MARK)],
        "messages": [
            {"role": "user", "content": [text('"Fix the sign in m.py"')]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "read", "input": {"filePath": PATH}} | MARK],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": FILE} | MARK]},
        ],
        "tools": [
            tool("bash", "command", command=WORD),
            tool("edit", "filePath", filePath=WORD, oldString=WORD, newString=WORD, replaceAll=FLAG),
            tool("read", "filePath", filePath=WORD, offset=NUMBER, limit=NUMBER),
        ],
        "tool_choice": {"type": "auto"},
        "stream": True,
    },
    AI_SDK_HEADERS,
)
CLINE_TURN = Recorded(
    "Cline",
    CLINE,
    "/v1/messages",
    {
        "model": "demo",
        "max_tokens": 4096,
        "system": [text("You are Cline.")],
        "messages": [
            {"role": "user", "content": [text("Fix the sign in m.py")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "call_1", "name": "read_files", "input": {"files": [{"path": PATH}]}}
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": FILE}]},
        ],
        "tools": [
            {"type": "web_search_20250305", "name": "web_search"},
            tool("read_files", "files", files={"type": "array"}) | {"eager_input_streaming": True},
            tool("editor", "path", "new_text", path=WORD, old_text={"anyOf": [WORD, {"type": "null"}]}, new_text=WORD)
            | {"eager_input_streaming": True},
        ],
        "tool_choice": {"type": "auto"},
        "stream": True,
    },
    AI_SDK_HEADERS[:2],
)
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
ZED_TURN = Recorded(
    "Zed",
    ZED,
    "/v1/messages",
    {
        "model": "demo",
        "max_tokens": 4096,
        "cache_control": {"type": "ephemeral"},
        "system": [text("You are a coding assistant.", **LONG)],
        "messages": [
            {"role": "user", "content": [text("Fix the sign in m.py")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I have to read it.", "signature": "rest-local"},
                    text("I look."),
                    {"type": "tool_use", "id": "call_1", "name": "read_file", "input": {"path": PATH}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "is_error": False,
                        "content": [text(FILE[:10]), text(FILE[10:])],
                    }
                ],
            },
        ],
        "tools": [
            tool("read_file", "path", path=WORD) | {"eager_input_streaming": False},
            tool("edit_file", "path", path=WORD, old_text=WORD, new_text=WORD) | LONG | {"eager_input_streaming": True},
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 4096},
        "metadata": {"user_id": "abc"},
        "temperature": 1.0,
        "stream": True,
    },
    (
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "fine-grained-tool-streaming-2025-05-14"),
        ("x-api-key", ""),
    ),
)
MESSAGES_REQUESTS = {
    "Claude Code, first": CLAUDE_START,
    "Claude Code, second": CLAUDE_TURN,
    "Claude Code, of a small model": CLAUDE_SIDE,
    "opencode, title": OPENCODE_TITLE,
    "opencode": OPENCODE_TURN,
    "Cline": CLINE_TURN,
    "Zed": ZED_TURN,
}
