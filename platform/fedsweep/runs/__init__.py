"""A run's folder and files, and the lock on them."""
