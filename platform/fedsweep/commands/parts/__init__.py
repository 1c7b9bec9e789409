"""What commands are made of: options, output, interrupts, what several of them do alike, what they say of names."""
