"""The stage curate; stage.py has its run."""
