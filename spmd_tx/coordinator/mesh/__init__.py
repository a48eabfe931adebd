"""The workers as the coordinator sees them: connections, generations, and why they were lost."""
