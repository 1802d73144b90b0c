"""Find models on the disk and on the hub by name, and describe them without loading.

Knows GGUF headers and file systems; loads no model, and reaches the network in `hub` only.
"""
