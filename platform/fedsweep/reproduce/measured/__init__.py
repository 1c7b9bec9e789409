"""Measurements: cells beside printed figures, groups, claims, untrained costs, a finished run's model."""
