"""Simulated users: who speaks to the agent, and how much of a request each message tells."""
