"""The client protocols: OpenAI's chat, completions and Responses, Anthropic's Messages, Ollama's, llama-server's.

Translation, both ways; knows no HTTP. `rest_local.server` and `rest_local.batch` are in front of it.

    JSON bytes -> check -> body -> Call.requests() -> the engine's requests
       what the engine generates -> Choice -> Part -> Answer -> events, or one object

- `bodies` has the types, `requests` makes the engine's request of a body, `answers` the one stream of parts of what the
  engine generates.
- Each protocol is a `Call` and an `Answer`: `openai`, `native`, `messages` with `messages_answer`, `responses` with
  `response_tools`, `responses_answer` and `response_storage`, `ollama`. Conversations of all of them become OpenAI's
  chat.
- `models` says what models there are, `vectors` computes of whole texts, `errors` has the shapes of refusals.
"""
