"""export: trajectories in a format that other viewers open."""
