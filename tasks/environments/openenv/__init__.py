"""openenv: any OpenEnv server as an environment; see the README."""
