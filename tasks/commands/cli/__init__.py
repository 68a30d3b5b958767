"""The arguments of `python -m tasks`. Each command imports what it needs when called, so `--help` answers at once."""
