"""Hold the clients: in this process, or on Ray actors."""
