"""Routes of Anthropic's Messages, on top of the same requests."""
