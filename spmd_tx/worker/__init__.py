"""A worker process: receives numbered commands, runs their steps on the mesh, and replies."""
