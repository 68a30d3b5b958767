"""`python -m tasks doctor`: checks that need no weights, of what no other gate looks at (list in `doctor.py`)."""
