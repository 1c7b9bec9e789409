"""What carries out a method: the engine, local training, the fleets, checkpoints."""
