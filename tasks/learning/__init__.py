"""Learning: from scored trajectories, or demonstrations, to new weights.

`trainer` is the reinforcement-learning loop over `advantages`, `batching` (tree packing), `losses`, `policy`,
`reference`, `optimizer` and `metrics`; `supervised` the loop of the warm start; `lora` adapters; `checkpoints` exact
resume; `curriculum` which problems come next; `options` their settings. An environment is never seen here: the trainer
is handed a `collect` callable. Nothing but torch, transformers and pydantic is needed (PEFT for LoRA), so a bare GPU
machine can run it.
"""
