"""Everything that uses Prefect. Start at `retrain.py`, the whole chain as one flow; `__main__` is the command line."""
