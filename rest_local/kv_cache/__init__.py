"""The KV cache: the backend that decodes, slots and the tokens that their cells hold, what is put into a batch."""
