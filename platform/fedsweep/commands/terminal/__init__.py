"""The commands' common side towards the terminal: options, output, interrupts."""
