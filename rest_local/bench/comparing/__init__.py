"""`bench compare`: the same prompts on every side in turns; plain decoding, our policies, drafters, other runtimes."""
