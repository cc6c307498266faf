"""What the ROCm driver says of this machine."""

from __future__ import annotations

import re
from pathlib import Path

_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_GFX_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)


def local_chips() -> tuple[str, ...]:
    """Return the gfx names of the GPUs of this machine, one for each, as the driver counts them.

    The driver writes a version as a decimal number: 90402 is 9.4.2, gfx942, and 90010 is 9.0.10,
    gfx90a.
    """
    found: list[str] = []
    for node in sorted(_KFD_NODES.glob("*/properties"), key=lambda path: path.parent.name):
        match = _GFX_VERSION.search(_text(node))
        version = int(match[1]) if match else 0
        if version:  # a CPU has 0
            found.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
