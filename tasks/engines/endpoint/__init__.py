"""A model behind an OpenAI-compatible endpoint, as a yardstick."""
