"""Host tensors, tensor descriptors, initial values and TSR files."""

from renaissance.tensor.dtensor import DTensor, slot_bytes
from renaissance.tensor.init import InitConfig, Initializer, fill_parameter
from renaissance.tensor.tensor import Tensor
from renaissance.tensor.tsr import load_first_tsr, load_one_tsr, load_tsr, save_tsr

__all__ = [
    "DTensor",
    "InitConfig",
    "Initializer",
    "Tensor",
    "fill_parameter",
    "load_first_tsr",
    "load_one_tsr",
    "load_tsr",
    "save_tsr",
    "slot_bytes",
]
