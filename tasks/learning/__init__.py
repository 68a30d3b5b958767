"""Learning: from scored trajectories, or demonstrations, to new weights.

`trainer` is the reinforcement-learning loop over `advantages`, `batching`, `losses` and `policy`; `supervised` the loop
of the warm start; `options` their settings. An environment is never seen here: the trainer is handed a `collect`
callable. Nothing but torch, transformers and pydantic is needed, so a bare GPU machine can run it.
"""
