"""Loggers of a run beside MLflow, a module each; the registry has them by name and makes them."""
