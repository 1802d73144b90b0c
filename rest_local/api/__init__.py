"""The client protocols: OpenAI's chat, completions and Responses, Anthropic's Messages, Ollama's, llama-server's.

This package translates requests and answers. It knows no HTTP; `rest_local.server` and `rest_local.batch` call it.

    JSON bytes -> check -> body -> Call.requests() -> the engine's requests
       what the engine generates -> Choice -> Part -> Answer -> events, or one object

- `bodies` has the types of the bodies, `requests` makes the engine's request from a body, and `answers` turns what the
  engine generates into one stream of parts.
- Each protocol is a `Call` and an `Answer`: `openai`, `native`, `messages` with `messages_answer`, `responses` with
  `response_tools` and `responses_answer`, `ollama`. All of them translate a conversation into
  OpenAI's chat.
- `models` describes the models, `vectors` computes embeddings, `errors` shapes error responses.
"""
