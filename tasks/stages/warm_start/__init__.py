"""The stage warm_start; stage.py has its run."""
