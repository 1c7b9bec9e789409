"""One client's work, in any process."""
