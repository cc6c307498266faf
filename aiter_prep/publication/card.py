"""The model card of a repository that holds prepared folders, one on each branch."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError
from aiter_prep.inspection.serving import needs, serving_lines, sharing_words
from aiter_prep.quantities import size
from aiter_prep.storage.hub import is_hub_name
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.inspection.prepared import PreparedGroup, PreparedInspection

CARD_FILE = "README.md"
BEGIN, END = "<!-- aiter-prep: conversions -->", "<!-- aiter-prep: end of conversions -->"
# of the source's card: what holds for every form of the same weights
KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag")


class ForeignCard(AiterPrepError):
    """A card that is not ours, or no longer: nothing of it may be changed."""


def default_branch(target: Mapping[str, Any]) -> str:
    """Return what the branch of a conversion is called: `vllm-0.33-tp8-gfx950`."""
    sharing = f"tp{target['tp']}" if target["ep"] == 1 else f"ep{target['ep']}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{target['name']}-{sharing}-{target['gfx']}")


def is_ours(card: str) -> bool:
    """Return whether a card has a place for the list of conversions."""
    return card.count(BEGIN) == card.count(END) == 1 and card.index(BEGIN) < card.index(END)


def new_card(
    repo_id: str, found: PreparedInspection, metadata: Mapping[str, Any] | None = None
) -> str:
    """Return a card whose list of conversions is empty.

    Args:
        repo_id: `org/name` of the repository.
        found: The first folder that it is to hold.
        metadata: Front matter of the source's own card.
    """
    name = repo_id.rpartition("/")[2]
    of = _code(str(found.source["name"]))
    return "\n".join(
        [
            "---",
            *_front_matter(found, metadata or {}),
            "---",
            "",
            f"# {name}",
            "",
            f"The weights of {of}, prepared ahead of time for the kernels of AMD's AITER with",
            "aiter-prep: the experts are cut for each rank, padded and laid out as the kernels",
            "read them. Each branch holds one conversion; this branch holds none.",
            "",
            "Do not load them with a loader that does not know the format: it would shuffle the",
            "weights a second time, and say nothing.",
            "",
            BEGIN,
            END,
            "",
        ]
    )


def with_conversion(
    card: str, repo_id: str, branch: str, found: PreparedInspection, digest: str
) -> str:
    """Return a card with the section of one conversion new or renewed, and all else as it was.

    Args:
        card: A card that `is_ours`.
        repo_id: `org/name` of the repository.
        branch: The branch of the conversion.
        found: What its folder holds.
        digest: The manifest's own digest.

    Raises:
        ForeignCard: It has no place for it.
    """
    if not is_ours(card):
        raise ForeignCard("the card has no place for the list of conversions")
    before, _, rest = card.partition(BEGIN)
    listed, _, after = rest.partition(END)
    first, last = f"<!-- aiter-prep: {branch} -->", f"<!-- aiter-prep: end of {branch} -->"
    section = "\n".join([first, *_section(repo_id, branch, found, digest), last])
    pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    if pattern.search(listed):
        listed = pattern.sub(lambda _: section, listed, count=1)
    else:
        listed = f"{listed.rstrip()}\n\n{section}\n\n"
    return f"{before}{BEGIN}{listed}{END}{after}"


def _front_matter(found: PreparedInspection, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of YAML; a JSON text is one of YAML, too."""
    for key in KEPT:
        value = metadata.get(key)
        if isinstance(value, str) or (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            yield f"{key}: {json.dumps(value)}"
    if found.source["revision"] and is_hub_name(found.source["name"]):
        yield f"base_model: {json.dumps(found.source['name'])}"
        # the nearest of the Hub's words: the same values, stored in another way
        yield "base_model_relation: quantized"
    yield "library_name: aiter-prep"
    yield 'tags: ["aiter-prep", "aiter", "rocm", "mixture-of-experts"]'


def _section(repo_id: str, branch: str, found: PreparedInspection, digest: str) -> Iterator[str]:
    folder = f"{repo_id.rpartition('/')[2]}-{branch}"
    target = found.target
    yield f"## `{branch}`"
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    for label, value in _facts(found, digest):
        yield f"| {label} | {value} |"
    yield ""
    yield "Download it, and check every byte:"
    yield ""
    yield "```sh"
    yield "pip install aiter-prep"
    yield f"hf download {repo_id} --revision {branch} --local-dir {folder}"
    yield f"aiter-prep verify {folder}"
    yield "```"
    yield ""
    yield f"Serve it. {needs(target)}"
    yield ""
    shell = serving_lines(target, folder, runs_python=False)
    yield "```sh" if shell else "```python"
    yield from shell or serving_lines(target, folder)
    yield "```"
    yield ""
    if found.is_lossy:
        yield "Its source cannot be had back from it: values were rounded as the engine does."
        return
    yield "Have the checkpoint back that it was made from:"
    yield ""
    yield "```sh"
    yield f"aiter-prep restore {folder} {folder}-restored"
    yield "```"


def _facts(found: PreparedInspection, digest: str) -> Iterator[tuple[str, str]]:
    target = found.target
    engine = f"{target['engine']} {target['engine_version']}"
    yield "made for", f"{_code(engine)} on {_code(target['gfx'])}, {sharing_words(target)}"
    revision = found.source["revision"]
    at = f" at commit {_code(revision)}" if revision else ""
    yield "made from", f"{_code(found.source['name'])}{at}"
    yield "model", f"{_code(found.architecture)}"
    for group in found.groups:
        yield "experts", _experts(group)
    for name, meaning in found.conversions.items():
        yield "changed values", f"{_code(name)}: {_text(meaning)}"
    if found.skipped:
        yield "left out", f"{len(found.skipped)} tensors, named in the manifest"
    yield (
        "size",
        f"{size(found.total_bytes)}, of which padding {size(found.padding_bytes)}",
    )
    by = found.created_by
    yield "written by", _code(f"{by['name']} {by['version']}, backend {by['backend']}")
    yield "manifest", _code(digest)


def _experts(group: PreparedGroup) -> str:
    facts = group.facts
    return (
        f"{group.modules} x {facts['num_experts']} in {_code(facts['scheme'])}, "
        f"hidden {facts['hidden']}, intermediate {facts['intermediate']} "
        f"(stored as {facts['padded_intermediate_per_rank']} per rank), "
        f"rows {facts['row_order']}"
    )


def _code(text: object) -> str:
    """Return a text as code in a cell; whatever it holds, it ends nothing and begins nothing."""
    return f"`{_text(text).replace('`', chr(39))}`"


def _text(text: object) -> str:
    plain = printable(str(text)).replace("|", "/").replace("\n", " ")
    return escape(plain, quote=False).replace("--&gt;", "--")
