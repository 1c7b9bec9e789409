"""Tasks: what is learned of the samples, and how it is judged."""
