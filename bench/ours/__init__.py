"""Our contenders, one module per bench."""
