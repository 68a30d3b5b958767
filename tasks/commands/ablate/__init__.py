"""ablate: one choice varied at a time."""
