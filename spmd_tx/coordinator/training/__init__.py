"""From a training request to steps and back to an outcome: lines, packing, batching, losses."""
