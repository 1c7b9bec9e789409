"""Data sets: what is known of each, how it is read, and where its files lie."""
