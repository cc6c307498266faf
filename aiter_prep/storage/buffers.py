"""The type of bytes in memory."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ByteArray: TypeAlias = npt.NDArray[np.uint8]
Bytes: TypeAlias = "bytes | bytearray | memoryview | ByteArray"
