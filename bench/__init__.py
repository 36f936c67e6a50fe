"""Measurements against peers; each script runs both sides alternately and ends with one line of JSON."""
