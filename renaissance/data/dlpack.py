"""DLPack export of delivered images, also as true bfloat16, which NumPy cannot name.

Everything but BF16 is NumPy's own export. For BF16 the managed tensor is built here from the public dlpack.h (ABI 0,
the unversioned struct, which every consumer accepts): one allocation that the consumer's deleter call ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

CPU_DEVICE = (1, 0)
"""(kDLCPU, device 0)."""

_BFLOAT_CODE = 4
_CAPSULE_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_alive: dict[int, tuple[Any, ...]] = {}  # address of a managed tensor -> what it must keep alive

# Prototypes of our own: those on ctypes.pythonapi are shared, and other libraries set theirs there.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@_Deleter  # type: ignore[untyped-decorator]
def _delete(address: int) -> None:
    _alive.pop(address, None)


@_CapsuleDestructor  # type: ignore[untyped-decorator]
def _destroy_capsule(capsule: int) -> None:
    # A consumer renames the capsule it has taken; then the tensor is the consumer's to delete.
    if _is_valid(capsule, _CAPSULE_NAME):
        _alive.pop(_get_pointer(capsule, _CAPSULE_NAME), None)


def bf16_capsule(patterns: npt.NDArray[np.uint16]) -> object:
    """A "dltensor" capsule of bfloat16 over the memory of ``patterns`` (C-contiguous uint16 bit patterns), no copy."""
    if patterns.dtype != np.uint16 or not patterns.flags.c_contiguous:
        raise TypeError(f"bf16 export: expected contiguous uint16 bit patterns, got {patterns.dtype}")
    dims = (ctypes.c_int64 * patterns.ndim)(*patterns.shape)
    strides = (ctypes.c_int64 * patterns.ndim)(*(s // 2 for s in patterns.strides))
    tensor = _Tensor(patterns.ctypes.data, *CPU_DEVICE, patterns.ndim, _BFLOAT_CODE, 16, 1, dims, strides, 0)
    managed = _ManagedTensor(tensor, None, ctypes.cast(_delete, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _alive[address] = managed, dims, strides, patterns
    return _new_capsule(address, _CAPSULE_NAME, _destroy_capsule)
