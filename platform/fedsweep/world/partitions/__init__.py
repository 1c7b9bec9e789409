"""Partitions of the training samples among the clients: their base, the kinds, and all of them by name in registry."""
