"""FedDHAD: how well a label divergence tells a non-IID degree."""
