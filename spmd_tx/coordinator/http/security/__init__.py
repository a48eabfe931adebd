"""Who may see and use what, and how much of it: access, cookies, signed URLs, quotas, connections."""
