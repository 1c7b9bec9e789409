"""Sweeps on Ray Tune: search spaces, the trainable, resources, resuming."""
