"""A run from its plan to its end, here or on a Ray actor, and who watches it."""
