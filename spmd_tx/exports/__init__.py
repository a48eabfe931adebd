"""Writes trained adapters in the formats of other servers and libraries, without a running server."""
