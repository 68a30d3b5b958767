"""Rollouts: from a model and a problem to a trajectory.

`collect` keeps many episodes in flight, `episode` is one of them, `chat` turns messages into tokens (appending, never
rendering twice), `engine` is the protocol of what generates and each `*_engine` file one that does. No loss lives here,
and nothing but torch, transformers and pydantic is needed, so a bare GPU machine can run it.
"""
