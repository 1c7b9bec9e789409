"""What one client does, in any process."""
