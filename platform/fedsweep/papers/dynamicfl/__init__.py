"""DynamicFL: choosing the high-frequency group alone, and pictures of who was in it."""
