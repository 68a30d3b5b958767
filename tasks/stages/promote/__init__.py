"""The stage promote; stage.py has its run."""
