"""The stage evaluate; stage.py has its run."""
