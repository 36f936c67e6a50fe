"""CUDA sources on the CPU: no GPU and no driver. Tests that need a C++ compiler or NVIDIA's wheels skip by name."""
