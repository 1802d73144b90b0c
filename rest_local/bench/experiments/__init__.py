"""The experiments of the papers and their open questions: each module measures one, and describes its result."""
