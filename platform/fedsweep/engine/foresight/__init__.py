"""What can be told before anything is trained: what a run will cost, and what of it will not be as was asked for."""
