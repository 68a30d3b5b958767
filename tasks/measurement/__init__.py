"""What a set of trajectories shows, with its uncertainty. Numbers only: no model, environment or registry is used."""
