"""What GRPO and supervised fine-tuning share."""
