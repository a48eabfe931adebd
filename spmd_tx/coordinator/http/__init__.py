"""The HTTP server: routes, keys, errors, limits on bodies. Parses, checks, calls one verb and answers."""
