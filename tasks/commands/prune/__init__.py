"""prune: what nothing needs any more, shown and removed."""
