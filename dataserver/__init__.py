"""The preprocessing daemon: reads, augments and delivers batches through shared memory."""

import os

# Workers are forked before any thread exists; NumPy's BLAS would start a pool on import that nobody here uses.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
