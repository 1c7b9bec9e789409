"""Codecs that come with the package: what a configuration's ``communication`` can name."""
