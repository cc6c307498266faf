"""The Hub's Xet storage on a disk: hf_xet's own store of chunks, without a network.

hf_xet takes a folder for a server where its address begins with `local://`. So the real client cuts
files into chunks, finds those that are there already, and puts files together again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

TOKEN_SECONDS = 3600

# In processes of their own, so that none of them keeps the store open.
PUT = """
import hf_xet, sys
with hf_xet.XetSession().new_upload_commit(endpoint=sys.argv[1]) as commit:
    for path in sys.argv[2:]:
        commit.start_upload_file(path, sha256=hf_xet.COMPUTE_SHA256)
"""
NAME = """
import hf_xet, json, sys
print(json.dumps([found.hash for found in hf_xet.hash_files(sys.argv[1:])]))
"""
GET = """
import hf_xet, sys
with hf_xet.XetSession().new_file_download_group(endpoint=sys.argv[1]) as group:
    group.start_download_file(hf_xet.XetFileInfo(sys.argv[2], int(sys.argv[3])), sys.argv[4])
"""


class XetStore:
    """Chunks in a folder, and the files that are known to be made of them.

    Args:
        home: A folder of its own.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = home / "chunks"
        self._folder.mkdir(parents=True)
        self._names: dict[str, tuple[str, int]] = {}

    def expect(self, *paths: Path) -> None:
        """Take note of files that are about to be uploaded, so that they are found by SHA-256."""
        names = json.loads(self._run(NAME, *paths))
        for path, name in zip(paths, names, strict=True):
            data = path.read_bytes()
            self._names[hashlib.sha256(data).hexdigest()] = name, len(data)

    def put(self, *paths: Path) -> None:
        """Upload files."""
        self.expect(*paths)
        self._run(PUT, self.address, *paths)

    def name_of(self, sha256: str) -> str:
        """Return what Xet calls a file."""
        return self._names[sha256][0]

    def get(self, sha256: str) -> bytes:
        """Return a file as its chunks have it."""
        name, size = self._names[sha256]
        path = self._home / sha256
        self._run(GET, self.address, name, size, path)
        return path.read_bytes()

    @property
    def address(self) -> str:
        """What the store is called."""
        return f"local://{self._folder}"

    def token(self) -> dict[str, str | int]:
        """Return what lets a client in."""
        expires = int(time.time()) + TOKEN_SECONDS
        return {"casUrl": self.address, "accessToken": "of nobody", "exp": expires}

    def _run(self, program: str, *arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={**os.environ, "HF_XET_CACHE": str(self._home / "cache")},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout
