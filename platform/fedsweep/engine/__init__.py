"""The server's side of a run: from the state after one round to the state after the next."""
