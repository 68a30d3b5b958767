"""Episodes of agents that drive themselves: they ask an endpoint for turns, and what was sampled is recorded."""
