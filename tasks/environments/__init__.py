"""Worlds an agent works in: tools, the state behind them, and the check of success.

`base` is the protocol, `catalog` the worlds by name, `tools` how calls are written and parsed; then one file a world.
A world knows nothing of models, engines or rewards.
"""
