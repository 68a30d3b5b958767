"""GRPO: advantages, losses, the trainer."""
