"""The benchmark of ``fedsweep bench``: set-ups, plain PyTorch loops beside them, and their comparison."""
