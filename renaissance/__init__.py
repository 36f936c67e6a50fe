"""Renaissance: a preprocessing daemon and a trainer that give the same bytes every time."""

__version__ = "0.1.0"
