"""Networks, the unit groups that sub-models cut along, and what a forward pass costs."""
