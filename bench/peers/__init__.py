"""Contenders that run in the peers' own environment; they never import ours."""
