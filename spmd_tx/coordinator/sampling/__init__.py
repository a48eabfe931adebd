"""Turns sample requests into Prefill and Decode commands: admission, pages, continuous batching."""
