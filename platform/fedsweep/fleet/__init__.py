"""Where clients are: in this process, or on Ray actors."""
