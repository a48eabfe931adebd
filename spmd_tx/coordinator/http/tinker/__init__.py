"""Routes of the Tinker API, a file per subject."""
