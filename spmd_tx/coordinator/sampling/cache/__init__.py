"""The cache of one data shard: pages of keys and values, and states of sequences."""
