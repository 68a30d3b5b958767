"""The order of the stages, one run at a time in a folder, and errors as one line."""
