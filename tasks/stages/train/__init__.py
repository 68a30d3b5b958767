"""The stage train; stage.py has its run."""
