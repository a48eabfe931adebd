"""After a loss: which snapshot a model starts from, and which requests run again."""
