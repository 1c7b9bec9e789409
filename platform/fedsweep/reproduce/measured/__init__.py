"""What is measured: cells beside what is printed, groups, claims, untrained costs, a finished run's model."""
