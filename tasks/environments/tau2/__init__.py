"""tau2: the customer service problems of τ²-bench, from the package inspect-evals."""
