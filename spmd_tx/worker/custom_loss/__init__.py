"""Runs custom losses in processes beside the mesh, with limits on time and memory."""
