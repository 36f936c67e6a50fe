"""CUDA: the same graphs as on the CPU, captured as CUDA Graphs. See docs/cuda.md."""
