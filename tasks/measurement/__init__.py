"""What a set of trajectories shows, and how sure that is: numbers only. No model, environment or registry is used."""
