"""Sweeps on Ray Tune: search spaces, the trainable, resources, resuming."""

from fedsweep.sweeps.tuning import sweep

__all__ = ["sweep"]
