"""Consumers for other frameworks: thin views of a ``TransferStation``; batches are handed over, not copied.

NumPy needs none: ``station.epoch(e)`` yields batches whose ``images`` and ``labels`` are arrays. ``pytorch`` has a
drop-in ``IterableDataset``, ``jax`` an iterator. Each imports its framework, so import the one you use.
"""
