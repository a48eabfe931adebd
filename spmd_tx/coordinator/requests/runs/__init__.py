"""What the log tells of training runs: metrics of steps, samples, and where their time goes."""
