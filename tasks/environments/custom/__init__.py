"""custom: an environment of the user's own, in tasks/custom/."""
