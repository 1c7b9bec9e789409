"""What ``fedsweep bench`` measures: set-ups, plain PyTorch loops beside them, and how the two are compared."""
