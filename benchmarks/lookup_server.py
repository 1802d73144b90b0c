"""llama-cpp-python with its prompt lookup (`LlamaPromptLookupDecoding`), as a server of the race.

    python -m benchmarks lookup_server -m GGUF -c N -t N --tokens N --host ADDRESS --port N

It answers GET /health, and POST /completion of tokens, greedily; one request at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from typing import Any


def answer(llama: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, or fewer if the model ends. What is in the cache is not evaluated again."""
    found: list[int] = []
    for token in islice(llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0), count):
        if token == llama.token_eos():
            break
        found.append(token)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=10, help="of a draft")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafts = LlamaPromptLookupDecoding(num_pred_tokens=args.tokens)
    # without logits_all, 0.3.36 has room for the logits of 512 positions only, and fails after them
    settings = {"n_ctx": args.c, "n_threads": args.t, "n_threads_batch": args.t, "logits_all": True, "verbose": False}
    llama = Llama(args.m, draft_model=drafts, **settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"status": "ok"})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send({"tokens": answer(llama, asked["prompt"], asked["n_predict"])})

        def _send(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    HTTPServer((args.host, args.port), Handler).serve_forever()
