"""Engines write the turns of episodes: one folder per engine, named by engine.name."""
