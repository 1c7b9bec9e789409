"""How the training samples fall to the clients: what a partition is, the kinds, and all of them by name in registry."""
