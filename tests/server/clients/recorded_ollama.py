"""What clients of Ollama's API send, written down from their sources: field names and values, with made-up text.

As in `recorded`: each names the file and the version it was read from.
"""

from __future__ import annotations

from recorded import GAP, PREFIX, SUFFIX, TOOLS, ZED_STOPS, Recorded

ZED = "zed-industries/zed crates/ollama/src/ollama.rs 0138cb1, ollama_edit_prediction_delegate.rs 3274a6a"
CONTINUE = "continuedev/continue core/llm/llms/Ollama.ts 0108be5"
OPEN_WEBUI = "open-webui/open-webui backend/open_webui/routers/ollama.py 0007ff3, utils/response.py 04a8a87"
RAYCAST = "MassimilianoPasquini97/raycast_ollama src/lib/ollama/ollama.ts 5c101d9"
OBSIDIAN = "zhongjis/obsidian-ollama src/Ollama.ts 0090505"
JSON = (("content-type", "application/json"),)
FETCH = (("content-type", "text/plain;charset=UTF-8"),)  # what node-fetch sends for a text without a type
CALL = {"function": {"name": "read_file", "arguments": {"path": "a.py"}}}
SYSTEM = {"role": "system", "content": "You are a coding assistant."}

ZED_CHAT = Recorded(
    "Zed",
    ZED,
    "/api/chat",
    {
        "model": "coder:latest",
        "messages": [
            SYSTEM,
            {"role": "user", "content": "What is in a.py?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": None},
            {"role": "tool", "tool_name": "read_file", "content": "x = 1\n"},
        ],
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 4096, "num_predict": None, "stop": ["<end>"], "temperature": 1.0, "top_p": None},
        "tools": TOOLS,
        "think": False,
    },
    JSON,
)
ZED_EDIT_PREDICTION = Recorded(
    "Zed",
    ZED,
    "/api/generate",
    {
        "model": "coder:latest",
        "prompt": GAP,
        "raw": True,
        "stream": False,
        "options": {"num_predict": 64, "temperature": 0.2, "stop": ZED_STOPS},
    },
    JSON,
)
_CONTINUE_OPTIONS = {
    "temperature": 0.01,
    "num_predict": 16,
    "stop": ["<|endoftext|>", "\n\n"],
    "num_ctx": 2048,
    "num_thread": None,
}
CONTINUE_CHAT = Recorded(
    "Continue",
    CONTINUE,
    "/api/chat",
    {
        "model": "coder",
        "messages": [{"role": "user", "content": "Add two numbers."}],
        "options": _CONTINUE_OPTIONS,
        "keep_alive": 1800,
    },
    (*JSON, ("authorization", "Bearer undefined")),
)
CONTINUE_TOOLS = Recorded(
    "Continue",
    CONTINUE,
    "/api/chat",
    CONTINUE_CHAT.body | {"tools": TOOLS, "stream": False},
    JSON,
)
CONTINUE_GAP = Recorded(
    "Continue",
    CONTINUE,
    "/api/generate",
    {
        "model": "coder",
        "prompt": PREFIX,
        "suffix": SUFFIX,
        "options": _CONTINUE_OPTIONS,
        "keep_alive": 1800,
        "stream": True,
    },
    JSON,
)
WEBUI_CHAT = Recorded(
    "Open WebUI",
    OPEN_WEBUI,
    "/api/chat",
    {
        "model": "coder:latest",
        "messages": [
            SYSTEM,
            {"role": "user", "content": "What is in a.py?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"index": 0, "id": "call_1"} | CALL],
            },
            {"role": "tool", "content": "x = 1\n", "tool_call_id": "call_1"},
        ],
        "options": {"temperature": 0.5, "num_ctx": 2048, "repeat_last_n": 32, "mirostat": 0, "num_gpu": 1},
        "stream": True,
        "keep_alive": "5m",
        "tools": TOOLS,
    },
    (*JSON, ("x-openwebui-user-name", "me")),
)
WEBUI_EMBED = Recorded("Open WebUI", OPEN_WEBUI, "/api/embed", {"model": "coder", "input": ["one", "two"]}, JSON)
RAYCAST_CHAT = Recorded(
    "Raycast",
    RAYCAST,
    "/api/chat",
    {"model": "coder:latest", "messages": [{"role": "user", "content": "Add two numbers."}], "keep_alive": "5m"},
    FETCH,
)
OBSIDIAN_PROMPT = Recorded(
    "Obsidian",
    OBSIDIAN,
    "/api/generate",
    {
        "prompt": 'Summarize the text.\n\n"One and one are two."',
        "model": "coder",
        "options": {"temperature": 0.2},
        "template": "",
    },
    (("content-type", ""),),
)
