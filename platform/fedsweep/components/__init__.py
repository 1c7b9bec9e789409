"""The seams of a method: one module each, with its abstract base and its FedAvg default."""
