"""A tensor over an address, through DLPack.

The other ways of giving torch an address ask the driver whose memory it is, and the driver does not
know reserved addresses with nothing mapped yet. DLPack takes our word for the device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_DEVICE_CODES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# torch looks at the description once more when the last tensor over it dies, whenever that is.
# A hundred bytes for each distinct range are therefore kept for good.
_descriptions: dict[tuple[int, int, str, int], tuple[_DLManagedTensor, Any]] = {}

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """``uint8 [num_bytes]`` over memory that is somebody else's, who must keep it mapped."""
    key = (address, num_bytes, device.type, device.index or 0)
    if key not in _descriptions:
        shape = (ctypes.c_int64 * 1)(num_bytes)
        tensor = _DLTensor(
            data=address,
            device_type=_DEVICE_CODES[device.type],
            device_id=device.index or 0,
            ndim=1,
            dtype_code=_UNSIGNED,
            dtype_bits=8,
            dtype_lanes=1,
            shape=shape,
        )
        _descriptions[key] = (_DLManagedTensor(tensor=tensor), shape)
    capsule = _new_capsule(ctypes.addressof(_descriptions[key][0]), b"dltensor", None)
    made: torch.Tensor = torch.from_dlpack(capsule)
    return made
