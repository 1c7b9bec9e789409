"""The things that can be named in a configuration, listed and described."""
