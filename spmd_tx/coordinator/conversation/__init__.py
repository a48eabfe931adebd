"""Conversations as the coordinator means them, in whatever dialect they came."""
