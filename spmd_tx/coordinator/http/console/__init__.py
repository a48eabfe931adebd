"""Routes of the console: what it shows, and its files."""
