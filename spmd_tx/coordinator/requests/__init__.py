"""The write-ahead log of requests: accepts them, stores them, and waits for their outcomes."""
