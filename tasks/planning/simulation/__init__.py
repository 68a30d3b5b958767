"""A training on N GPUs as a discrete-event simulation: `cluster` simulates with `engine`, `measured` and `assumed` give
it its numbers, `allocation` looks for the best split into trainers and engines.
"""
