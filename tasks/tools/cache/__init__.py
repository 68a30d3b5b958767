"""The tool cache: what tools answered is kept, and served instead of asking again."""
