"""PruneFL: the rule, the first stage, the method."""
