"""Who may do what, and what they have used: callers, API keys, the audit log, usage."""
