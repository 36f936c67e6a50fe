"""From a stored set and the options of a session to finished rows: what workers do, and what replays a batch alone."""
