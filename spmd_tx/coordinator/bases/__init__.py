"""Base models as clients see them: their names, limits and texts, and how the groups are that serve them."""
