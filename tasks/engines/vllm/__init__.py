"""vLLM, in this process or behind servers."""
