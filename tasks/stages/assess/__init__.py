"""The stage assess; stage.py has its run."""
