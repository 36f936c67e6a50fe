"""The commands; see ``renaissance.cli.main`` for the table of them."""
