"""What a person asks for: one module or folder per command; their arguments are in `cli/`."""
