"""Model folders and what is done with them before anything is trained or generated."""
