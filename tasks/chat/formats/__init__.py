"""How each model family writes tool calls: one file per format, `catalog.py` lists them."""
