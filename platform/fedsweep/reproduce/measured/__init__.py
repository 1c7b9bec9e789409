"""What is measured: cells beside what is printed, claims over seeds, costs without training, a finished run's model."""
