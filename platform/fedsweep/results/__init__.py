"""Runs that are read back: their figures, over rounds and over seeds."""
