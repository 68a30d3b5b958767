"""Rewards: pure functions of (problem, trajectory), so that stored trajectories can be scored again."""
