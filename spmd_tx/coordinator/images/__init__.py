"""Images that clients send: checked and counted on arrival, and prepared in child processes."""
