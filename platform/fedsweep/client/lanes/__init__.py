"""Clients stepped together: who goes with whom, and the step of several clients at once."""
