"""From scored trajectories, or demonstrations, to new weights. Start with plain_grpo.py, then README.md.

It never sees an environment. torch, transformers and pydantic suffice (and PEFT for LoRA).
"""
