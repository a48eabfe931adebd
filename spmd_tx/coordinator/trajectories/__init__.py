"""What agents have sampled, kept as trees of turns with their tokens: to go on from, and to train on."""
