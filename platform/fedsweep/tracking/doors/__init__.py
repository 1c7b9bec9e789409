"""The doors through which a run goes out beside MLflow, a module each; which there are and who opens them: registry."""
