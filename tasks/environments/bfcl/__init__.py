"""bfcl: the multi-turn categories of the Berkeley Function Calling Leaderboard."""
