"""Learning: from scored trajectories, or demonstrations, to new weights. Start with plain_grpo.py, then README.md.

It never sees an environment: the trainer gets a `collect` callable. torch, transformers and pydantic suffice (and PEFT
for LoRA).
"""
