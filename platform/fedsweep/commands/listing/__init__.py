"""What can be named in a configuration, listed and described."""
