"""Sessions, models and samplers: creates them, looks them up, lists and searches them."""
