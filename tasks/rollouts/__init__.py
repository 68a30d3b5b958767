"""Rollouts: from a model and a problem to a trajectory.

`collect` keeps many episodes in flight, `episode` is one of them, `engine` is the protocol of what generates. No loss
is here, and torch, transformers and pydantic suffice, so a bare GPU machine can run it.
"""
