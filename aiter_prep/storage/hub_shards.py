"""A repository of the Hub as a folder elsewhere, whose files come one by one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.errors import BadSource
from aiter_prep.storage.hub import hub_faults, network_faults
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.supply import Promise

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
WHOLE = 200  # the status of an answer that is not a part
TIMEOUT_SECONDS = 60
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before another attempt


class HubFolder:
    """A repository at one commit.

    Args:
        repo_id: `org/name`.
        revision: Branch, tag or commit; the default branch if None.

    Raises:
        BadSource: The repository or the revision is missing or out of reach.
    """

    def __init__(self, repo_id: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # many files at a time; the conversion shows its own
        with hub_faults(repo_id, revision):
            info = HfApi(library_name="aiter-prep").model_info(
                repo_id, revision=revision, files_metadata=True
            )
        if not _COMMIT.fullmatch(info.sha or ""):  # it becomes the name of a folder
            raise BadSource(f"the Hub names no commit of `{printable(repo_id)}`")
        self.name = repo_id
        self.revision: str | None = info.sha
        self.state = self._commit = str(info.sha)
        self.files: Mapping[str, Promise] = {
            file.rfilename: (
                Promise(file.lfs.size, "sha256", file.lfs.sha256)
                if file.lfs
                else Promise(file.size or 0, "git" if file.blob_id else "", file.blob_id or "")
            )
            for file in info.siblings or ()
        }

    def fetch(self, file: str, folder: Path) -> None:
        """Bring a file into a folder; go on with what was begun there.

        Raises:
            BadSource: It cannot be had.
        """
        from huggingface_hub import hf_hub_download

        with hub_faults(self.name, self.revision):
            hf_hub_download(self.name, file, revision=self._commit, local_dir=folder)

    def read(self, file: str, start: int, size: int) -> bytes:
        """Return some bytes of a file, less where it ends.

        Raises:
            BadSource: They cannot be had.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        headers = build_hf_headers(library_name="aiter-prep")
        headers |= {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        with hub_faults(self.name, self.revision):
            url = hf_hub_url(self.name, file, revision=self._commit)
            for pause in (*PAUSES, None):
                try:
                    answer = get_session().get(url, headers=headers, timeout=TIMEOUT_SECONDS)
                    hf_raise_for_status(answer)
                    data: bytes = answer.content
                    break
                except network_faults() as fault:
                    if pause is None or getattr(fault, "response", None) is not None:
                        raise
                    time.sleep(pause)
        if answer.status_code == WHOLE and start:
            raise BadSource(
                f"the Hub sends `{printable(file)}` as a whole only", "leave out --stream"
            )
        return data[:size]
