"""agent: a world around an agent that drives itself, a program or an async function of the user's."""
