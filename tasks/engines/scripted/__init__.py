"""The scripted engine writes given texts, for tests, baselines and replays: it has no weights."""
