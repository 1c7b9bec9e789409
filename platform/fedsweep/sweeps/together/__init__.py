"""Trials that one process plays side by side, their clients in the same lanes."""
