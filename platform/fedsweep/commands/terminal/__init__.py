"""What commands share towards the terminal: options, output, interrupts."""
