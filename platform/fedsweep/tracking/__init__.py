"""Observers of a run: MLflow, Ray Tune, in memory; they see everything and change nothing."""
