"""Tables, plots and pages made from finished runs."""
