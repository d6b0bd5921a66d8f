"""Which layers make which stage, and what crosses each boundary."""
