"""Runs and trials played under somebody's eyes."""
