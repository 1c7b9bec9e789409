"""A table as its YAML file defines it: its sections, and what the paper prints."""
