"""Measurement: what a set of trajectories says, how sure it is, and how a person sees it.

`statistics` turns trajectories into numbers with intervals; `figures` draws the progress chart; `summary` writes
summary.json and prints the closing table; `report` builds the page with trajectories side by side. All of it works
from stored files alone: no model, no environment and no registry is touched here.
"""
