"""What a run leaves: its folder, tables, checkpoints and result."""
