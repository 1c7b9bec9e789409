"""Other hubs than the server: where models meet there, what travels between them, and how long that takes."""
