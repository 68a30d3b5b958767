"""Worker processes that play the episodes of an environment, so that tools use more than one core."""
