"""Routes, API keys, errors, limits on bodies: parses and checks a request, calls one function, answers."""
