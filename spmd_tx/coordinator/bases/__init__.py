"""Base models as clients see them: their names, limits and texts."""
