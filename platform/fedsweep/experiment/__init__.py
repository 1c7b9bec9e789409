"""An experiment as objects: built once, checked once, with what it tells everybody."""
