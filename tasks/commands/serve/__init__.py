"""The command `serve`: a model behind the gateway's protocols, which follows its alias in the registry."""
