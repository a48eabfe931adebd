"""Who may do what, and what they used: callers, API keys, the audit log, usage."""
