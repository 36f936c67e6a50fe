"""Host tensors, tensor descriptors, initial values and TSR files."""
