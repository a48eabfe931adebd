"""The write-ahead log of requests: accepts, stores, counts losses, and waits for outcomes."""
