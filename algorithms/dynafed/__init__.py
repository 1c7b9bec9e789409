"""DynaFed: synthetic data from the trajectory of global models."""
