"""The types of bytes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ByteArray: TypeAlias = "npt.NDArray[np.uint8]"
Bytes: TypeAlias = "bytes | bytearray | memoryview | ByteArray"
Writable: TypeAlias = "bytearray | memoryview | ByteArray"
