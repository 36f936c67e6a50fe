"""Benches that need a GPU. ``bench/gpu/run_all.sh`` runs the GPU tests and all of these in one go."""
