"""What is deleted, and when; and backups."""
