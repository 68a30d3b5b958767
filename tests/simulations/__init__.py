"""What promotion promises, simulated with turnwise's own functions: each stated rate held against many drawn worlds.

A module here holds functions `simulate_…(num_trials, seed)` that give 1.0 or 0.0 per trial, a yes or a no, and `RATES`,
a tuple that says what each is stated to be. `all_rates` finds the modules by itself.
`tests/stages/promote/test_rates.py` runs a fifth of the trials, `tests/benchmarks/test_rates.py` all of them; the table
of infra/benchmarks.md is the latter's.
"""
