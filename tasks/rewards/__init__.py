"""Rewards: pure functions of (problem, trajectory), so that a stored trajectory can be scored again at any time.

`outcome` is 1 for success and 0 otherwise, the default: shaped parts were less stable wherever they were compared.
`parts` adds those for format and execution, below the outcome by construction, and refuses a reward that is no number.
"""
