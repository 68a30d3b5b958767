"""Learning: from scored trajectories, or demonstrations, to new weights. Start with plain_grpo.py, then README.md.

An environment is never seen here: the trainer gets a `collect` callable. torch, transformers and pydantic are enough
(PEFT for LoRA), so a bare GPU machine can run it.
"""
