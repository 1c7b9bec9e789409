"""DynaFed: the synthetic set of a finished run."""
