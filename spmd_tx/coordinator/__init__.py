"""The server process: answers clients, keeps the log of requests, decides what the workers run."""
