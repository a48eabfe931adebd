"""From conversations and texts to tokens: chat templates, and tokenizing within limits on time and memory."""
