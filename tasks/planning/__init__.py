"""What a run takes before it starts: memory by part, seconds by phase, dollars, and the nearest settings that fit.

Arithmetic over settings and a model's shape. No weights are read and no heavy library is imported.
"""
