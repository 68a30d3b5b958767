"""A model behind an OpenAI-compatible endpoint is a baseline for evaluation only: it shows no token ids."""
