"""The checks of the promotion policy."""
