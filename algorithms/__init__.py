"""The methods: one module per family, plus the registry that names them."""
