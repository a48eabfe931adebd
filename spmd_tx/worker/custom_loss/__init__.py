"""Runs custom losses in processes beside the mesh, with bounds on their time and memory."""
