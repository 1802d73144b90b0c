"""Let a model edit files: the text file on disk, the conversation about it, and the file in the answer."""
