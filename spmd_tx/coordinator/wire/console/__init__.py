"""The JSON that the console reads."""
