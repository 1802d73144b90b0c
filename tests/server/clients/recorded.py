"""What editors and agents send, written down from their sources: field names and values, with made-up text.

Each `Recorded` names the file and the version it was read from. To update one, read the source again and change
`source` as well. The tests in this folder check what the same source reads of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PREFIX = "import math\n\n\ndef area(radius):\n"
SUFFIX = "\n\n\nprint(area(2))\n"
CHUNK = {"text": "def volume(radius):\n    return 4 / 3 * math.pi * radius**3\n", "filename": "solids.py"}
SYSTEM = {"role": "system", "content": "You are an expert coder."}
LONG_MS = 600_000  # in place of the client's own limit: a test must not depend on the machine


@dataclass(frozen=True)
class Recorded:
    """One request. `headers`: those that could matter, with what a client without a key puts there."""

    client: str
    source: str
    path: str
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


LLAMA_VIM = "ggml-org/llama.vim autoload/llama.vim 381730b"
LLAMA_VSCODE = "ggml-org/llama.vscode src/llama-server.ts of 2026 (the version with request traces)"
ZED = "zed-industries/zed crates/llama_cpp/src/llama_cpp.rs 3600c4f, crates/edit_prediction/src/fim.rs 1160a72"
CONTINUE = "continuedev/continue core/llm/llms/LlamaCpp.ts 0c38ecf, OpenAI.ts 0069b94"
CLINE = "cline/cline src/core/api/providers/openai.ts df61315"
ROO = "RooCodeInc/Roo-Code src/api/providers/openai.ts 003d9d4"
OPEN_WEBUI = "open-webui/open-webui backend/open_webui/routers/openai.py 671f577"
AIDER = "aider-chat 0.86.2, recorded from a run against this server: fields, roles and lengths; the words are our own"
CODEX = "@openai/codex 0.169.0, recorded from runs against this server: fields, types and order; the words are our own"
OPENCODE = "opencode-ai 1.18.33 with @ai-sdk/openai, recorded from a run against this server; the words are our own"
NO_KEY = (("authorization", "Bearer"),)  # as the server reads it; the client sends a space after it

VIM_INFILL = Recorded(
    "llama.vim",
    LLAMA_VIM,
    "/infill",
    {
        "id_slot": 0,
        "input_prefix": PREFIX,
        "input_suffix": SUFFIX,
        "input_extra": [CHUNK | {"time": [1763, 5]}],
        "prompt": "    return ",
        "n_predict": 16,
        "stop": [],
        "n_cmpl": 3,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.90,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": LONG_MS,
        "t_max_predict_ms": LONG_MS,
        "response_fields": [
            "content",
            "timings/prompt_n",
            "timings/prompt_ms",
            "timings/prompt_per_token_ms",
            "timings/prompt_per_second",
            "timings/predicted_n",
            "timings/predicted_ms",
            "timings/predicted_per_token_ms",
            "timings/predicted_per_second",
            "truncated",
            "tokens_cached",
        ],
    },
    NO_KEY,
)
VIM_INFILL_WARM_UP = Recorded(
    "llama.vim",
    LLAMA_VIM,
    "/infill",
    {
        "id_slot": 0,
        "input_prefix": "",
        "input_suffix": "",
        "input_extra": [CHUNK | {"time": [1763, 5]}],
        "prompt": "",
        "n_predict": 0,
        "temperature": 0.0,
        "samplers": [],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
        "response_fields": [""],
    },
    NO_KEY,
)
VIM_EDIT = Recorded(
    "llama.vim",
    LLAMA_VIM,
    "/v1/chat/completions",
    {
        "id_slot": 1_000_003,  # counts up with every edit
        "messages": [SYSTEM, {"role": "user", "content": "INSTRUCTION: add a docstring"}],
        "min_p": 0.1,
        "temperature": 0.1,
        "samplers": ["min_p", "temperature"],
        "stop": [],
        "stream": True,
        "cache_prompt": True,
    },
    NO_KEY,
)
VIM_EDIT_WARM_UP = Recorded(
    "llama.vim",
    LLAMA_VIM,
    "/v1/chat/completions",
    {
        "id_slot": 1_000_003,
        "messages": [SYSTEM, {"role": "user", "content": ""}],
        "samplers": [],
        "n_predict": 0,
        "stream": False,
        "cache_prompt": True,
        "response_fields": [""],
    },
    NO_KEY,
)
VSCODE_INFILL = Recorded(
    "llama.vscode",
    LLAMA_VSCODE,
    "/infill",
    {
        "id_slot": 0,
        "input_prefix": PREFIX,
        "input_suffix": SUFFIX,
        "input_extra": [CHUNK],
        "prompt": "    return ",
        "n_predict": 16,
        "n_cmpl": 3,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "n_indent": 4,
        "t_max_prompt_ms": LONG_MS,
        "t_max_predict_ms": LONG_MS,
        "lora": [{"id": 0, "scale": 0.5}],
        "model": "coder",
    },
)
VSCODE_WARM_UP = Recorded(
    "llama.vscode",
    LLAMA_VSCODE,
    "/infill",
    {
        "id_slot": 0,
        "input_prefix": "",
        "input_suffix": "",
        "input_extra": [CHUNK],
        "prompt": "",
        "n_predict": 0,
        "samplers": [],
        "cache_prompt": True,
        "t_max_prompt_ms": LONG_MS,
        "t_max_predict_ms": 1,
    },
)
VSCODE_EDIT = Recorded(
    "llama.vscode",
    LLAMA_VSCODE,
    "/v1/chat/completions",
    {
        "messages": [SYSTEM, {"role": "user", "content": "Modify the code: add a docstring."}],
        "stream": False,
        "cache_prompt": True,
        "samplers": "edkypmxt",
        "temperature": 0.8,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "max_tokens": 16,  # the client's is -1
        "timings_per_token": False,
    },
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
TOOL_TURN = [
    SYSTEM,
    {"role": "user", "content": "What is in a.py?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "x = 1\n"},
]
VSCODE_AGENT = Recorded(
    "llama.vscode",
    LLAMA_VSCODE,
    "/v1/chat/completions",
    {"messages": TOOL_TURN, "stream": True, "model": "coder", "tools": TOOLS, "tool_choice": "auto", "max_tokens": 64},
)
ZED_CHAT = Recorded(
    "Zed",
    ZED,
    "/v1/chat/completions",
    {
        "model": "coder",
        "messages": [
            {"role": "system", "content": "You are a coding assistant."},
            {"role": "user", "content": "What is in a.py?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "x ="}, {"type": "text", "text": " 1"}]}
            | {"tool_call_id": "call_1"},
        ],
        "stream": True,
        "temperature": 1.0,
        "tools": TOOLS,
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    },
)
ZED_STOPS = [
    "<|endoftext|>",
    "<|file_separator|>",
    "<|fim_pad|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<PRE>",
    "<SUF>",
    "<MID>",
    "[PREFIX]",
    "[SUFFIX]",
]
GAP = f"<|fim_prefix|>{PREFIX}    return <|fim_suffix|>{SUFFIX}<|fim_middle|>"
ZED_EDIT_PREDICTION = Recorded(
    "Zed",
    ZED,
    "/v1/completions",
    {"model": "coder", "prompt": GAP, "max_tokens": 16, "stop": ZED_STOPS},
)
CONTINUE_LLAMA_CPP = Recorded(
    "Continue",
    CONTINUE,
    "/completion",
    {
        "prompt": GAP,
        "stream": True,
        "n_predict": 16,
        "mirostat": 0,
        "stop": ["<|endoftext|>", "<|fim_prefix|>", "/src/", "#- coding: utf-8", "```", "\n\n"],
        "temperature": 0.01,
    },
    (("authorization", "Bearer undefined"),),
)
CONTINUE_OPENAI = Recorded(
    "Continue",
    CONTINUE,
    "/v1/chat/completions",
    {
        "messages": [{"role": "user", "content": "Rewrite area with a docstring."}],
        "model": "gpt-4o-mini",  # it sends `prediction` for this name and gpt-4o only
        "max_tokens": 64,
        "stream": True,
        "stop": ["```"],
        "prediction": {"type": "content", "content": f"{PREFIX}    return math.pi * radius**2\n"},
    },
    (("authorization", "Bearer undefined"), ("api-key", "")),
)
CACHED = {"cache_control": {"type": "ephemeral"}}
CLINE_CHAT = Recorded(
    "Cline",
    CLINE,
    "/v1/chat/completions",
    {
        "model": "coder",
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "<task>Add.</task>"}, {"type": "text", "text": "ls"}],
            },
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
)
ROO_CHAT = Recorded(
    "Roo Code",
    ROO,
    "/v1/chat/completions",
    {
        "model": "coder",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You are Roo."} | CACHED]},
            {"role": "user", "content": [{"type": "text", "text": "<task>Add.</task>"} | CACHED]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_completion_tokens": 64,
    },
)
WEBUI_CHAT = Recorded(
    "Open WebUI",
    OPEN_WEBUI,
    "/v1/chat/completions",
    {
        "stream": True,
        "model": "coder",
        "messages": [{"role": "user", "content": "Add two numbers."}],
        "stream_options": {"include_usage": True},
        "logit_bias": {"0": -100},
        "max_tokens": 16,
        "user": {"name": "me", "id": "1", "email": "me@localhost", "role": "admin"},
    },
)


def _aider(form: str, lengths: tuple[int, ...], stream: bool) -> Recorded:
    """Rules, examples as if they had been said before, the file, and the task; roles take turns."""
    said = [("word " * length)[:length] for length in lengths]
    said[-3] = "The file:\n\nm.py\n```\ndef add(a, b):\n    return a - b\n```\n".ljust(lengths[-3])
    said[-1] = "fix the sign\n\n".ljust(lengths[-1], "x")
    roles = ["system", *(("user", "assistant")[number % 2] for number in range(len(said) - 1))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    body = {"messages": messages, "model": "demo", "temperature": 0} | ({"stream": True} if stream else {})
    return Recorded(
        f"aider, {form}",
        AIDER,
        "/v1/chat/completions",
        body,
        (
            ("authorization", "Bearer any"),
            ("user-agent", "OpenAI/Python 2.20.0"),
            ("x-stainless-read-timeout", "600.0"),
        ),
    )


_DIFF = (5272, 44, 704, 35, 491, 100, 3, 264, 49, 3071)
_WHOLE = (1191, 37, 201, 100, 3, 264, 49, 865)
AIDER_EDITS = {
    (form, stream): _aider(form, lengths, stream)
    for form, lengths in (("diff", _DIFF), ("whole", _WHOLE))
    for stream in (True, False)
}


def _said(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


def _function(name: str, **properties: str) -> dict[str, Any]:
    described = {key: {"type": kind, "description": "An argument."} for key, kind in properties.items()}
    schema = {"type": "object", "properties": described, "required": [*properties][:1], "additionalProperties": False}
    return {"type": "function", "name": name, "description": "A tool.", "strict": False, "parameters": schema}


_EXEC = _function("exec_command", cmd="string", workdir="string", yield_time_ms="number")
_LINES = 'start: first rest*\nfirst: "*** Begin" LF\nrest: /[^\\n]*/ LF\n\n%import common.LF\n'
_LARK = {"type": "grammar", "syntax": "lark", "definition": _LINES}
_WEB = {"type": "web_search", "external_web_access": False}
_SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "# Tool discovery",
    "parameters": _function("", query="string", limit="number")["parameters"],
}


def _codex(form: str, tools: list[dict[str, Any]], *, in_items: bool = False, **fields: Any) -> Recorded:
    """The first request of a task. `in_items`: its tools come as an item."""
    items = [
        _said("developer", "You are a coding agent.\n" * 20),
        _said("developer", "<skills_instructions>", "<permissions instructions>"),
        _said("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
        _said("user", "fix the sign in m.py"),
    ]
    if in_items:
        items.insert(0, {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools})
    body = {
        "model": "demo",
        "stream": True,
        "input": items,
        **({} if in_items else {"tools": tools}),
        "tool_choice": "auto",
        "parallel_tool_calls": not in_items,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a204fc-6e14-78e0-bbc5-43cd36037ee6",
        "client_metadata": {"session_id": "01a204fc-6e14-78e0-bbc5-43cd36037ee6", "x-codex-turn-metadata": "{}"},
    }
    headers = (("accept", "text/event-stream"), ("originator", "codex_exec"), ("x-codex-window-id", "01a204fc:0"))
    return Recorded(f"Codex, {form}", CODEX, "/v1/responses", body | fields, headers)


CODEX_TASKS = {
    "functions": _codex(
        "functions",
        [
            _EXEC,
            _function("write_stdin", session_id="number", chars="string"),
            {"type": "namespace", "name": "agents", "description": "", "tools": [_function("close", target="string")]},
            _WEB,
        ],
    ),
    "apply_patch": _codex(
        "apply_patch",
        [_EXEC, {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": _LARK}, _SEARCH, _WEB],
        reasoning={"effort": "medium", "summary": "auto"},
        text={"verbosity": "low"},
    ),
    "exec": _codex(
        "exec",
        [
            {
                "type": "namespace",
                "name": "functions",
                "description": "",
                "tools": [
                    {"type": "custom", "name": "exec", "description": "Runs a script.", "format": _LARK},
                    _function("wait", cell_id="string"),
                ],
            },
            {"type": "namespace", "name": "clock", "description": "", "tools": [_function("sleep", ms="number")]},
        ],
        in_items=True,
        reasoning={"effort": "low", "summary": "auto", "context": "all_turns"},
        text={"verbosity": "low"},
    ),
}
OPENCODE_TASK = Recorded(
    "opencode",
    OPENCODE,
    "/v1/responses",
    {
        "model": "demo",
        "input": [
            {"role": "developer", "content": "You are a coding agent."},
            {"role": "user", "content": [{"type": "input_text", "text": "fix the sign in m.py"}]},
        ],
        "max_output_tokens": 4096,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "ses_dfaed91bdffe7maFBp3oIHWiKq",
        "tools": [_function("bash", command="string", description="string"), _function("edit", filePath="string")],
        "tool_choice": "auto",
        "stream": True,
    },
    (("authorization", "Bearer any"),),
)
OPENCODE_TITLE = Recorded(
    "opencode, title",
    OPENCODE,
    "/v1/responses",
    {
        "model": "demo",
        "input": [
            {"role": "developer", "content": "You are a title generator."},
            {"role": "user", "content": [{"type": "input_text", "text": "Generate a title:\n"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "fix the sign in m.py"}]},
        ],
        "max_output_tokens": 4096,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream": True,
    },
    (("authorization", "Bearer any"),),
)
