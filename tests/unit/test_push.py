"""A prepared folder is pushed to a branch of the Hub; the Hub is a server of our own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiter_prep.errors import InvalidUsage
from aiter_prep.inspection.prepared import PreparedInspection, inspect_prepared
from aiter_prep.publication import card as cards
from aiter_prep.publication import check_place, default_branch
from aiter_prep.verification import verify
from hub_server import REPO, Client, Commit, HubServer, Repository
from prepared import MANIFEST, prepare
from support import fixture

TARGET = "some-org/prepared-model"
BRANCH = "aiter-tp2-gfx950"
Push = Callable[..., dict[str, Any]]


@pytest.fixture
def server(hub: HubServer) -> HubServer:
    hub.reset()
    return hub


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for two ranks; its source has a card with a licence."""
    home = tmp_path_factory.mktemp("made")
    shutil.copytree(fixture("qwen3_moe-ct-mxfp4"), home / "some-model")
    (home / "some-model" / "README.md").write_text("---\nlicense: apache-2.0\nx: y\n---\n# mine\n")
    prepare(home / "some-model", home / "prepared", 2, max_shard_bytes=200_000)
    return home / "prepared"


@pytest.fixture
def push(server: HubServer, client: Client, made: Path, tmp_path: Path) -> Push:
    assert server.repositories == {}

    def run(*more: str, folder: Path = made) -> dict[str, Any]:
        return client.json(tmp_path, "push", str(folder), TARGET, *more)

    return run


def repository(server: HubServer) -> Repository:
    return server.repositories[TARGET]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def held(server: HubServer, branch: str = BRANCH) -> dict[str, bytes]:
    files = dict(repository(server).files(branch))
    del files[".gitattributes"]
    return files


def card_of(server: HubServer) -> str:
    return repository(server).files("main")["README.md"].decode()


def test_the_branch_holds_the_folder_byte_for_byte(
    server: HubServer, push: Push, made: Path
) -> None:
    document = push()
    assert document["schema"] == "aiter-prep/push/1"
    assert document["branch"] == BRANCH
    assert document["commit"] == repository(server).branches[BRANCH]
    assert document["uploaded_files"] == document["files"] == len(content(made))
    assert document["card"] == "written"
    assert held(server) == content(made)
    assert not repository(server).private


def test_main_holds_the_card_and_no_weights(server: HubServer, push: Push) -> None:
    push("--private")
    assert set(repository(server).files("main")) == {".gitattributes", "README.md"}
    assert repository(server).private


def test_the_manifest_comes_last(server: HubServer, push: Push) -> None:
    push()
    repo = repository(server)
    states = []
    oid: str | None = repo.branches[BRANCH]
    while oid is not None:
        states.append(set(repo.commits[oid].files))
        oid = repo.commits[oid].parent
    assert [MANIFEST in names for names in states] == [True, *[False] * (len(states) - 1)]
    assert len(states) >= 3


def test_a_copy_from_the_hub_is_sound(server: HubServer, push: Push, tmp_path: Path) -> None:
    push()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in repository(server).files(BRANCH).items():
        (copy / name).write_bytes(data)
    (copy / ".cache" / "huggingface").mkdir(parents=True)  # of a download into a folder
    assert verify(copy).is_clean


def test_a_second_push_sends_nothing(server: HubServer, push: Push) -> None:
    first = push()
    server.uploads.clear()
    second = push()
    assert (second["uploaded_files"], second["card"]) == (0, "unchanged")
    assert second["commit"] == first["commit"]
    assert server.uploads == []


def test_a_push_that_was_cut_off_leaves_no_manifest_and_goes_on(
    server: HubServer, push: Push, made: Path
) -> None:
    server.refuse_after = 2
    document = push()
    assert document["exit_code"] == 1
    assert TARGET in document["error"]
    assert "goes on" in document["hint"]
    assert MANIFEST not in repository(server).files(BRANCH)
    server.refuse_after = 1000
    server.upload_cuts = 1  # the client tries again by itself
    shards = sorted(made.glob("*.safetensors"))
    assert push()["exit_code"] == 0
    assert held(server) == content(made)
    assert len(server.uploads) == len(set(server.uploads)) == len(shards)


def test_what_arrived_is_not_sent_again(server: HubServer, push: Push, made: Path) -> None:
    push()
    repo = repository(server)
    files = repo.files(BRANCH)
    gone = min(name for name in files if name.endswith(".safetensors"))
    del files[gone], files[MANIFEST]
    server.uploads.clear()
    server.objects.clear()
    document = push()
    assert document["uploaded_files"] == 2
    assert len(server.uploads) == 1
    assert held(server) == content(made)


@pytest.mark.parametrize("hurt", ["shard", "missing", "more", "unfinished"])
def test_what_is_not_sound_is_not_pushed(
    server: HubServer, push: Push, made: Path, tmp_path: Path, hurt: str
) -> None:
    folder = tmp_path / "hurt"
    shutil.copytree(made, folder)
    shard = max(folder.glob("*.safetensors"))
    if hurt == "shard":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif hurt == "missing":
        shard.unlink()
    elif hurt == "more":
        (folder / "notes.txt").write_text("not of the folder")
    else:
        (folder / MANIFEST).unlink()
        (folder / ".aiter_prep.journal").touch()
    assert push(folder=folder)["exit_code"] == 3
    assert server.repositories == {}


def test_a_folder_that_changes_behind_its_check_gets_no_manifest(
    server: HubServer, push: Push, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(made, folder)
    shard = min(folder.glob("*.safetensors"))
    server.before_upload = lambda: shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    document = push(folder=folder)
    assert document["exit_code"] == 1
    assert f"`{shard.name}`" in document["error"]
    assert MANIFEST not in held(server)


def test_another_conversion_is_replaced_only_if_asked(
    server: HubServer, push: Push, made: Path, tmp_path: Path
) -> None:
    push()
    other = tmp_path / "other"
    prepare(fixture("qwen3_moe-ct-mxfp4"), other, 1)
    document = push("--revision", BRANCH, folder=other)
    assert document["exit_code"] == 12
    assert "another conversion" in document["error"]
    assert held(server) == content(made)
    assert push("--revision", BRANCH, "--overwrite", folder=other)["exit_code"] == 0
    assert held(server) == content(other)
    repo = repository(server)
    states = [repo.commits[repo.branches[BRANCH]]]
    while states[-1].parent is not None:
        states.append(repo.commits[states[-1].parent])
    for state in states:  # at no time shards of one beside the manifest of the other
        if MANIFEST in state.files:
            assert state.files.items() >= (content(made) | content(other)).items() or set(
                state.files
            ) - {".gitattributes"} in (set(content(made)), set(content(other)))


def test_what_is_not_of_a_folder_is_not_taken_away(
    server: HubServer, push: Push, made: Path
) -> None:
    push()
    repository(server).files(BRANCH)["notes.txt"] = b"of somebody"
    del repository(server).files(BRANCH)[MANIFEST]
    document = push()
    assert document["exit_code"] == 12
    assert "`notes.txt`" in document["error"]
    assert push("--overwrite")["exit_code"] == 0
    assert held(server) == content(made)


def test_what_a_repository_began_with_is_nobodys(server: HubServer, push: Push, made: Path) -> None:
    begun = Repository(False, {}, {})
    begun.add(
        "main", Commit({".gitattributes": b"", "LICENSE.txt": b"of the Hub"}, None, "initial")
    )
    server.repositories[TARGET] = begun
    server.refuse_after = 1
    assert push()["exit_code"] == 1
    assert "LICENSE.txt" in begun.files(BRANCH)
    server.refuse_after = 1000
    assert push()["exit_code"] == 0
    assert held(server) == content(made)
    assert "LICENSE.txt" in begun.files("main")


def test_two_conversions_share_a_card(server: HubServer, push: Push, tmp_path: Path) -> None:
    push()
    other = tmp_path / "other"
    prepare(fixture("qwen3_moe-ct-mxfp4"), other, 1)
    assert push(folder=other)["branch"] == "aiter-tp1-gfx950"
    card = card_of(server)
    for branch in (BRANCH, "aiter-tp1-gfx950"):
        assert card.count(f"## `{branch}`") == 1
        assert f"hf download {TARGET} --revision {branch}" in card
        assert set(held(server, branch)) >= {MANIFEST, "config.json"}


def test_what_a_person_wrote_into_the_card_stays(server: HubServer, push: Push) -> None:
    push()
    files = repository(server).files("main")
    files["README.md"] = files["README.md"].replace(b"# prepared-model", b"# My own words")
    assert push("--revision", "again")["card"] == "written"
    assert "# My own words" in card_of(server)
    assert card_of(server).count("license:") == 1


def test_the_card_of_somebody_else_is_left_alone(server: HubServer, push: Push) -> None:
    push()
    files = repository(server).files("main")
    files["README.md"] = b"# Not ours"
    server.uploads.clear()
    refusal = push("--revision", "again")
    assert refusal["exit_code"] == 12
    assert "card" in refusal["error"]
    assert cards.BEGIN in refusal["hint"]
    assert "again" not in repository(server).branches
    assert push("--revision", "again", "--card", "leave")["card"] == "left"
    assert files["README.md"] == b"# Not ours"
    assert push("--revision", "again", "--card", "replace")["card"] == "written"
    assert cards.is_ours(card_of(server))


def test_the_card_names_licence_source_commit_and_what_to_type(
    server: HubServer, push: Push, client: Client, tmp_path: Path
) -> None:
    server.files = content(fixture("minimax_m3-mxfp8"))
    server.files["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    done = client.json(tmp_path, "convert", REPO, "out", "--tp", "2", "--target", "vllm")
    assert done["exit_code"] == 0, done
    push(folder=tmp_path / "out")
    card = card_of(server)
    head = card.split("---\n")[1]
    assert 'license: "apache-2.0"' in head
    assert f'base_model: "{REPO}"' in head
    folder = "prepared-model-vllm-0.33-tp2-gfx950"
    for words in (
        f"at commit `{server.commit}`",
        f"aiter-prep verify {folder}",
        f"vllm serve {folder} --load-format aiter_prep --tensor-parallel-size 2",
        f"aiter-prep restore {folder} {folder}-restored",
    ):
        assert words in card


def test_a_conversion_is_pushed_when_it_is_done(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    arguments = [str(fixture("qwen3_moe-ct-mxfp4")), "out", "--tp", "1", "--push", TARGET]
    document = client.json(tmp_path, "convert", *arguments, "--private")
    assert document["pushed"]["branch"] == "aiter-tp1-gfx950"
    assert held(server, "aiter-tp1-gfx950") == content(tmp_path / "out")
    assert repository(server).private


def test_what_keeps_a_push_from_working_is_said_before_the_conversion(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    server.refusal = (403, "Forbidden")
    arguments = [str(fixture("qwen3_moe-ct-mxfp4")), "out", "--tp", "1", "--push", TARGET]
    document = client.json(tmp_path, "convert", *arguments)
    assert document["exit_code"] == 1
    assert "may not write" in document["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ((401, "Unauthorized"), "does not know who"),
        ((403, "Forbidden"), "may not write"),
        ((404, "RepoNotFound"), "not a repository"),
        ((500, "Broken"), "cannot write"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    server: HubServer, push: Push, refusal: tuple[int, str], error: str
) -> None:
    server.refusal = refusal
    document = push()
    assert document["exit_code"] == 1
    assert error in document["error"]


@pytest.mark.parametrize(
    ("repo_id", "branch", "card"),
    [
        ("name", None, "write"),
        ("../name", None, "write"),
        ("org/name", "main", "write"),
        ("org/name", "a..b", "write"),
        ("org/name", "-x", "write"),
        ("org/name", "a b", "write"),
        ("org/name", "refs/heads/x", "write"),
        ("org/name", None, "burn"),
    ],
)
def test_names_that_are_none_are_refused(repo_id: str, branch: str | None, card: str) -> None:
    with pytest.raises(InvalidUsage):
        check_place(repo_id, branch, card)


def inspection(made: Path, **changes: Any) -> PreparedInspection:
    from dataclasses import replace

    return replace(inspect_prepared(made), **changes)


def test_branches_are_named_after_what_differs(made: Path) -> None:
    target = inspect_prepared(made).target
    assert default_branch(target) == BRANCH
    assert default_branch({**target, "name": "vllm@0.33", "tp": 1, "ep": 8}) == (
        "vllm-0.33-ep8-gfx950"
    )


def test_no_name_of_a_model_escapes_its_place_in_the_card(made: Path) -> None:
    evil = "`</code><script>alert(1)</script>|\n# x <!-- aiter-prep: end of conversions -->"
    found = inspection(made, source={"name": evil, "revision": "a"}, architecture=evil)
    empty = cards.new_card("o/n", found, {"license": "x: [", "language": ["a", "b"]})
    assert cards.is_ours(empty)
    text = cards.with_conversion(empty, "o/n", "b", found, "xxh3-128:0")
    assert cards.is_ours(text)
    assert "<script>" not in text.split("---\n", 2)[2]
    assert not any(line.startswith("# x") for line in text.splitlines())
    assert cards.with_conversion(text, "o/n", "b", found, "xxh3-128:0") == text
