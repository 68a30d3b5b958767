"""Environments: the tools an agent calls, the state behind them, and the check of success; one folder each."""
