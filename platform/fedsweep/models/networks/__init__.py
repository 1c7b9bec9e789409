"""The networks that come with the package: one module each, found by name in the registry beside this folder."""
