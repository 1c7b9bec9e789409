"""What is measured: cells beside what is printed, choosers of groups, claims, costs untrained, a finished run's model."""
