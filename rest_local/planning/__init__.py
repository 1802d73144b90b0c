"""Planning: what is likely to be accepted, when to look something up, how much to draft."""
