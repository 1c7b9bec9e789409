"""What is measured: cells beside what is printed, groups, claims over seeds, untrained costs, a finished run's model."""
