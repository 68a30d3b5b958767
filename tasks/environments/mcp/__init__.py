"""mcp: any server of the Model Context Protocol as an environment."""
