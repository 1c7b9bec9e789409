"""Parameters that a configuration sets: their ranges, and which ones a builder takes."""
