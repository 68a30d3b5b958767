"""mixture: several environments trained in one run, each with its share of the problems and its own budgets."""
