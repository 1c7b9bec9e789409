"""FedDHAD: weights from non-IID degrees (FedDH), and adaptive dropout (FedAD)."""
