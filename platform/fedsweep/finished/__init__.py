"""A finished run again: its model loaded, tested on other data, given more rounds."""
