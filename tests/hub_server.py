"""A Hub of our own on loopback: as much of its HTTP API as the real client needs.

It serves downloads (ranges, commits, LFS digests) and takes uploads (LFS, commits, branches), keeps
everything in memory, and can misbehave: refuse, cut connections, send other bytes than it promises.
With a store of Xet it sends clients that speak Xet there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from huggingface_hub import RepoCard

from xet_store import XetStore

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-org/some-model"
TOKEN = "hf_of_the_tests"  # noqa: S105 - of nobody
Answer = tuple[int, dict[str, str], bytes]
NOT_FOUND = 404


def is_large(name: str) -> bool:
    """Whether a file is kept outside git, under its SHA-256."""
    return name.endswith(".safetensors")


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class Commit:
    """A state of a repository: its files, and the commit before."""

    files: dict[str, bytes]
    parent: str | None
    title: str


@dataclass
class Repository:
    """A repository that is written."""

    private: bool
    commits: dict[str, Commit]
    branches: dict[str, str]

    def add(self, branch: str, commit: Commit) -> str:
        text = json.dumps([commit.parent, commit.title, sorted(commit.files)]).encode()
        oid = hashlib.sha1(text + os.urandom(8), usedforsecurity=False).hexdigest()
        self.commits[oid] = commit
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> str | None:
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)].files


@dataclass
class HubServer:
    """The state of the server.

    Attributes:
        files: The files of `REPO`, which is only read.
        commit: What it is at.
        repositories: Those that were written, by name.
        refusal: A status and a code with which everything is refused.
        fetched: Files that were asked for.
        downloaded: Files that were downloaded from their first byte on.
        cuts: File to how many more downloads of it end after half of what was asked for.
        lies: File to the bytes that are sent in the place of its own.
        uploads: SHA-256 of each large file that was sent.
        upload_cuts: How many more uploads are cut off.
        before_upload: Called when a repository is asked for, behind the check of a folder.
        refuse_after: How many large files are taken, before the others are refused.
        sent_bytes: Bytes of files that were sent out.
        url: Where it listens.
        xet: Where large files lie in chunks, or None.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT
    repositories: dict[str, Repository] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None
    fetched: list[str] = field(default_factory=list)
    downloaded: list[str] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    lies: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    upload_cuts: int = 0
    refuse_after: int = 1000
    before_upload: Callable[[], object] | None = None
    sent_bytes: int = 0
    url: str = ""
    xet: XetStore | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Forget everything but the address; what the client has in its cache counts no more."""
        fresh = HubServer(url=self.url, lock=self.lock, commit=os.urandom(20).hex())
        self.__dict__.update(fresh.__dict__)

    def repository(self, name: str) -> Repository | None:
        if name == REPO:
            state = Commit(self.files, None, "")
            return Repository(False, {self.commit: state}, {"main": self.commit})
        return self.repositories.get(name)

    def answer(  # noqa: PLR0911 - one for each endpoint
        self, method: str, path: str, body: bytes, headers: Any
    ) -> Answer:
        path = unquote(path.partition("?")[0])
        if self.refusal is not None:
            return refused(*self.refusal)
        # the address of an upload is a secret of its own
        is_signed = headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/lfs/")
        if method not in ("GET", "HEAD") and not is_signed:
            return refused(401, "Unauthorized")
        match path.strip("/").split("/"):
            case ["api", "repos", "create"]:
                return self.create(json.loads(body))
            case ["api", "validate-yaml"]:
                return as_json({"errors": list(faults_of(json.loads(body))), "warnings": []})
            case ["lfs", digest]:
                return self.take_object(digest, body)
            case ["api", "models", owner, name, *rest]:
                return self.api(f"{owner}/{name}", rest, body)
            case [owner, git, "info", "lfs", "objects", "batch"]:
                return self.batch(f"{owner}/{git.removesuffix('.git')}", json.loads(body))
            case [owner, name, "resolve", revision, *file]:
                if method == "GET" and "Range" not in headers:
                    self.downloaded.append("/".join(file))
                return self.resolve(f"{owner}/{name}", revision, "/".join(file), headers)
        return refused(NOT_FOUND, "RepoNotFound")

    def create(self, asked: dict[str, Any]) -> Answer:
        if self.before_upload is not None:
            self.before_upload()
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            said = {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            return 409, {}, json.dumps(said).encode()
        is_private = asked.get("private") is True or asked.get("visibility") == "private"
        made = Repository(is_private, {}, {})
        made.add("main", Commit({".gitattributes": b"*.safetensors filter=lfs\n"}, None, "initial"))
        self.repositories[name] = made
        return as_json({"url": f"{self.url}/{name}", "name": name})

    def api(self, name: str, rest: list[str], body: bytes) -> Answer:  # noqa: PLR0911
        repository = self.repository(name)
        if repository is None:
            return refused(NOT_FOUND, "RepoNotFound")
        if self.xet is not None and rest[:1] in (["xet-read-token"], ["xet-write-token"]):
            return xet_token(self.xet)
        what, revision = [*rest, "revision", "main"][:2] if not rest else (rest[0], rest[-1])
        if what == "refs":
            return as_json(
                {
                    "branches": [
                        {"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit}
                        for b, commit in repository.branches.items()
                    ],
                    "converts": [],
                    "tags": [],
                }
            )
        if what == "branch":
            start = json.loads(body).get("startingPoint", "main")
            repository.branches[revision] = repository.branches.get(start, start)
            return as_json({})
        oid = repository.at(rest[1] if len(rest) > 1 else revision)
        if oid is None:
            return refused(NOT_FOUND, "RevisionNotFound")
        if what == "commit":
            return self.take_commit(repository, rest[1], body)
        if what == "preupload":
            return as_json({"files": [mode(file["path"]) for file in json.loads(body)["files"]]})
        if what == "commits":
            return as_json(list(history(repository, oid)))
        files = repository.commits[oid].files
        if what == "tree":
            return as_json([entry(path, files[path]) for path in sorted(files)])
        siblings = [{"rfilename": p, **details(d), "lfs": lfs(p, d)} for p, d in files.items()]
        return as_json({"id": name, "modelId": name, "sha": oid, "siblings": siblings})

    def take_commit(self, repository: Repository, branch: str, body: bytes) -> Answer:
        lines = [json.loads(line) for line in body.splitlines()]
        head = lines[0]["value"]
        parent = repository.branches[branch]
        if head.get("parentCommit") not in (None, parent):
            return refused(412, "PreconditionFailed")
        files = dict(repository.files(parent))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.object(value["oid"])
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        oid = repository.add(branch, Commit(files, parent, head["summary"]))
        return as_json({"commitUrl": f"{self.url}/a/b/commit/{oid}", "commitOid": oid})

    def object(self, oid: str) -> bytes:
        if oid not in self.objects and self.xet is not None:
            self.objects[oid] = self.xet.get(oid)
        return self.objects[oid]

    def batch(self, name: str, asked: dict[str, Any]) -> Answer:
        assert name in self.repositories
        objects: list[dict[str, Any]] = []
        for item in asked["objects"]:
            found: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.objects:
                found["actions"] = {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}
            objects.append(found)
        return as_json({"transfer": "basic", "objects": objects})

    def take_object(self, digest: str, body: bytes) -> Answer:
        if len(self.uploads) >= self.refuse_after:
            return 507, {}, b"no room is left"
        if sha256_of(body) != digest:
            return 400, {}, b"other bytes than were promised"
        self.objects[digest] = body
        self.uploads.append(digest)
        return 200, {}, b""

    def resolve(self, name: str, revision: str, file: str, headers: Any) -> Answer:
        repository = self.repository(name)
        if repository is None:
            return refused(NOT_FOUND, "RepoNotFound")
        oid = repository.at(revision)
        if oid is None:
            return refused(NOT_FOUND, "RevisionNotFound")
        files = repository.commits[oid].files
        if file not in files:
            return refused(NOT_FOUND, "EntryNotFound")
        self.fetched.append(file)
        told = files[file]
        data = self.lies.get(file, told)
        answer = {"X-Repo-Commit": oid, "ETag": f'"{blob_of(told)}"', "Accept-Ranges": "bytes"}
        if is_large(file):
            answer |= {"X-Linked-Etag": f'"{sha256_of(told)}"', "X-Linked-Size": str(len(told))}
            if self.xet is not None:
                route = f"{self.url}/api/models/{name}/xet-read-token/{oid}"
                answer["Link"] = f'<{route}>; rel="xet-auth"'
                answer["X-Xet-Hash"] = self.xet.name_of(sha256_of(data))
        asked = headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last) + 1 if last else len(data)
            if begin >= len(data):
                return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
            part = data[begin:end]
            answer["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
            return 206, answer, part
        return 200, answer, data


def refused(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": "refused"}, b""


def xet_token(store: XetStore) -> Answer:
    token = store.token()
    headers = {
        "X-Xet-Cas-Url": str(token["casUrl"]),
        "X-Xet-Access-Token": str(token["accessToken"]),
        "X-Xet-Token-Expiration": str(token["exp"]),
    }
    return 200, headers, json.dumps(token).encode()


def as_json(document: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()


def faults_of(asked: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield what is wrong with the front matter of a card."""
    try:
        RepoCard(asked["content"])
    except ValueError as fault:
        yield {"message": str(fault)}


def mode(path: str) -> dict[str, Any]:
    kind = "lfs" if is_large(path) else "regular"
    return {"path": path, "uploadMode": kind, "shouldIgnore": False}


def lfs(path: str, data: bytes) -> dict[str, Any] | None:
    if not is_large(path):
        return None
    return {"oid": sha256_of(data), "sha256": sha256_of(data), "size": len(data), "pointerSize": 1}


def details(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "blobId": blob_of(data)}


def entry(path: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_of(data)}
    if is_large(path):
        found["lfs"] = lfs(path, data)
    return found


def history(repository: Repository, oid: str | None) -> Iterator[dict[str, Any]]:
    """Yield the commits from one back to the first."""
    while oid is not None:
        commit = repository.commits[oid]
        yield {
            "id": oid,
            "title": commit.title,
            "message": "",
            "authors": [{"user": "somebody"}],
            "date": "2026-01-01T00:00:00.000Z",
        }
        oid = commit.parent


@contextmanager
def serving() -> Iterator[HubServer]:
    """Run a server of its own while the context is open."""
    state = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one piece; else each answer waits for an acknowledgement

        def handle_one(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            if self.command == "PUT" and state.upload_cuts > 0:
                state.upload_cuts -= 1
                self.rfile.read(size // 2)
                self.close_connection = True
                self.connection.close()
                return
            body = self.rfile.read(size)
            with state.lock:
                status, headers, data = state.answer(self.command, self.path, body, self.headers)
                name = unquote(self.path.rpartition("/")[2])
                is_cut = self.command == "GET" and state.cuts.get(name, 0) > 0
                if is_cut:
                    state.cuts[name] -= 1
                if self.command == "GET" and "/resolve/" in self.path:
                    state.sent_bytes += len(data) // 2 if is_cut else len(data)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            if is_cut:
                self.wfile.flush()
                self.close_connection = True

        do_GET = do_HEAD = do_POST = do_PUT = handle_one  # noqa: N815 - the server looks for them

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub_url: str, home: Path, *, xet: bool = False) -> dict[str, str]:
    """The environment in which the real client talks to a server, with a cache of its own."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "0" if xet else "1",
        "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1",
    }


class Client:
    """The command line with the real client, in one process for many calls.

    Args:
        server: The server that it talks to.
        home: Where the client keeps its cache.
        xet: Whether it speaks Xet, too.
    """

    LOOP = """
import contextlib, io, json, os, sys
from aiter_prep.cli import main
for line in sys.stdin:
    folder, arguments = json.loads(line)
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""

    def __init__(self, server: HubServer, home: Path, *, xet: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.LOOP],
            env=environment(server.url, home, xet=xet),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), arguments]), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        assert "Traceback" not in err
        return subprocess.CompletedProcess(arguments, code, out, err)

    def json(self, folder: Path, *arguments: str) -> dict[str, Any]:
        """Run a command; return its JSON object, and the exit code in it."""
        done = self.run(folder, *arguments, "--json", "-q")
        document: dict[str, Any] = json.loads(done.stdout)
        document.setdefault("exit_code", done.returncode)
        assert document["exit_code"] == done.returncode
        return document

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def run_with(hub_url: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with the real client, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "aiter_prep", *arguments],
        cwd=home,
        env=environment(hub_url, home),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
