"""The scenario: data sets, partitions, drift, availability, devices and budgets, the same for every method."""
