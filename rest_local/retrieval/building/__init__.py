"""Build an index: text to tokens to sorted segments, and the commit."""
