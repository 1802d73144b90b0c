"""Models that draft: a small model of the same vocabulary, MTP layers, EAGLE-3 heads, block drafters.

`drafter` is the interface.
"""
