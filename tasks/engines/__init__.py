"""What generates: one folder per engine; engine.name is the name of the folder."""
