"""plan: memory, seconds and dollars of a run, before anything is downloaded or started."""
