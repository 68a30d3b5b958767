"""An engine that says what it was told to, for tests and checks."""
