"""A model that judges episodes: a rubric, votes of a JSON schema, a cache by content, and measured agreement."""
