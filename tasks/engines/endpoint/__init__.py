"""A model behind an OpenAI-compatible endpoint is a yardstick of evaluation: it shows no token ids."""
