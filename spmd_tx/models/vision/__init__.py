"""Images: the vision tower that makes tokens of patches, and its weights."""
