"""OpenAI's Responses API: /v1/responses. `routes` has its calls, `turn` the translation of a request to a chat."""
