"""Check, repair and describe an index, and move it between machines."""
