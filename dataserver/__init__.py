"""The preprocessing daemon."""
