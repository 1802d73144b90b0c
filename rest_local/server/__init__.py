"""The HTTP server: OpenAI's and llama-server's calls."""
