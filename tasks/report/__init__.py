"""The report: one folder with an overview of a run's numbers and a browser of its trajectories, side by side."""
