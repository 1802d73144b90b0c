"""HTTP: OpenAI's and llama-server's calls on top of the engine's service."""
