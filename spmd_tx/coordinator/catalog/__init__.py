"""Creates, looks up, lists and searches sessions, models and samplers."""
