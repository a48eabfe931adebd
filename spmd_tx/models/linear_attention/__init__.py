"""Linear attention: Gated DeltaNet layers, and the states of the sequences being sampled."""
