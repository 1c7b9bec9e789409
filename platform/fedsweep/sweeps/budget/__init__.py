"""The budget of a study: bytes, virtual time, hours, trials."""
