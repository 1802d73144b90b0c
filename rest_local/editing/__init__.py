"""Edits of files by a model: the text file on disk, the conversation that asks for it, and the file in the answer."""
