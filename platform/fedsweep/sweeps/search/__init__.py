"""Searches: what is proposed, and which setting gets one more seed."""
