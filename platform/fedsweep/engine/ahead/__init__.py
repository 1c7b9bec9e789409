"""Rounds before they are played: costs that no plan says."""
