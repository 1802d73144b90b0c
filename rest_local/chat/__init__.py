"""Chat: conversations, the chat templates of models, and the formats in which models call tools."""
