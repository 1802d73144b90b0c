"""Catalog: which models are on the disk and on the hub, under which names, and what is known of them without loading.

Knows GGUF headers and file systems; loads no model, and reaches the network in `hub` only.
"""
