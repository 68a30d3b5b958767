"""Model folders: how they are checked, hashed, loaded and set up."""
