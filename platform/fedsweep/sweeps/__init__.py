"""Sweeps on Ray Tune: search spaces, the trainable, resources, resuming."""

from fedsweep.sweeps.tuner import sweep

__all__ = ["sweep"]
