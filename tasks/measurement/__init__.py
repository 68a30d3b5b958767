"""Measurement: what a set of trajectories says, how sure it is, and how a person sees it.

`statistics` turns trajectories into numbers with intervals; `sentinel` watches training for collapse; `figures` draws
the progress chart, with `chart_levels` and `chart_panels` its parts and `drawing` what every picture shares; `summary`
writes summary.json and prints the closing table; `report` builds the page with trajectories side by side; `ablation`
and `ablation_figure` set variants of training side by side. All of it works from stored files and metrics alone: no
model, no environment and no registry is touched here.
"""
