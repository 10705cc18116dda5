"""Protobuf messages: the vectors of the protocol reference, and results with batched fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinker_lightning.wire import tinker_pb2 as pb

# The vectors of the protocol reference, section 21.
FORWARD = bytes.fromhex(
    "0a016d10011a380a0c0a0a0a08010000000200000012280a0d7461726765745f746f6b656e7312170a1002000000000000000300000000000000"
    "1802220102220d63726f73735f656e74726f70793001"
)
PPO = bytes.fromhex(
    "0a016d10011a540a0c0a0a0a08010000000200000012280a0d7461726765745f746f6b656e7312170a1002000000000000000300000000000000"
    "1802220102121a0a0777656967687473120f0a080000803f000000001801220102220370706f2a1d0a12636c69705f6c6f775f7468726573686f"
    "6c6411cdccccccccccec3f3a0b0a046e6f746512031201783a1f0a12636c69705f6c6f775f7468726573686f6c64120909cdccccccccccec3f"
)
CSR = bytes.fromhex(
    "12360a080000003f0000803e12180000000000000000010000000000000002000000000000001a10020000000000000000000000000000001801"
    "22020203"
)
OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000040c0121800000000000000000800000000"
    "0000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f83f"
)
SAMPLE = bytes.fromhex("0a160801120807000000080000001a08000000bf000080be12080000c07f000080bf")


def batched(
    data: bytes, offsets: list[int], dtype: Any = pb.DTYPE_FLOAT32, trailing: list[int] | None = None, count: int = 0
) -> bytes:
    message = pb.ForwardBackwardOutput()
    record = message.loss_fn_outputs.add(num_datums=count)
    field = record.fields["x"]
    field.data, field.offsets, field.dtype = data, np.array(offsets, "<i8").tobytes(), dtype
    field.trailing_shape.extend(trailing or [])
    return message.SerializeToString()
