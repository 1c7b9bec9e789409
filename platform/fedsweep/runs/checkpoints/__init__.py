"""The checkpoints of a run: how they are written and read, and what a state is as bytes."""
