"""Routes of OpenAI's API, on top of the same requests."""
