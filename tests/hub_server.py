"""A stand-in for the Hugging Face hub: the HTTP API of uploads and downloads, with files in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

OWNER, TOKEN, READ_TOKEN = "owner", "hf_writes", "hf_reads"


@dataclass
class Repository:
    """A repository: its files at each commit, the newest last."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, changes: Mapping[str, bytes | None]) -> str:
        """Add a commit; None deletes a file."""
        merged = {**(self.files if self.commits else {}), **changes}
        files = {path: content for path, content in merged.items() if content is not None}
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        return name

    def find(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the newest commit."""
        return list(self.commits.values())[-1]


@dataclass
class Hub:
    """The state of the server.

    Requests that contain a part in `failing` are answered with `status`; a silent server never answers.
    """

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    failing: tuple[str, ...] = ()
    status: int = 409
    is_silent: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, repo: str, files: dict[str, bytes], **options: Any) -> Repository:
        made = self.repositories[repo] = Repository(**options)
        made.commit({".gitattributes": b"*.safetensors filter=lfs", **files})
        return made

    def add_folder(self, repo: str, folder: Path, **options: Any) -> Repository:
        return self.add(repo, {path.name: path.read_bytes() for path in folder.iterdir()}, **options)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self) -> None:
        if self.hub.is_silent:
            self.hub.closing.wait()
            return None
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if any(part in f"{self.command} {path}" for part in self.hub.failing):
            return self._send(self.hub.status, {"error": "no storage left"})
        for method, pattern, name in _ROUTES:
            if method in (self.command, "*") and (found := re.fullmatch(pattern, path)):
                return getattr(self, name)(content, **found.groupdict())
        return self._send(404, {"error": "no such page"})

    @property
    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _send(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def _repository(self, repo: str, revision: str, *, content: bool) -> tuple[Repository, str] | None:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and self._token is None):
            self._refuse(404 if self._token else 401, "RepoNotFound")
        elif found.gated and content:
            self._refuse(403 if self._token else 401, "GatedRepo")
        elif (commit := found.find(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return found, commit
        return None

    def whoami(self, content: bytes) -> None:
        if self._token not in (TOKEN, READ_TOKEN):
            return self._send(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
        role = "write" if self._token == TOKEN else "read"
        token = {"displayName": "laptop", "role": role}
        return self._send(200, {"type": "user", "name": OWNER, "orgs": [], "auth": {"accessToken": token}})

    def validate(self, content: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def create(self, content: bytes) -> None:
        wanted = json.loads(content)
        repo = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        about = {"url": f"{self.hub.address}/{repo}", "name": repo}
        if repo in self.hub.repositories:
            return self._send(409, about)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.add(repo, {}, private=private)
        return self._send(200, about)

    def info(self, content: bytes, repo: str, revision: str = "main") -> None:
        if (found := self._repository(repo, revision or "main", content=False)) is None:
            return
        repository, commit = found
        siblings = [{"rfilename": file} for file in sorted(repository.commits[commit])]
        about = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": repository.private}
        self._send(200, {**about, "gated": "manual" if repository.gated else False})

    def tree(self, content: bytes, repo: str, revision: str) -> None:
        if (found := self._repository(repo, revision, content=False)) is not None:
            files = found[0].commits[found[1]].items()
            self._send(200, [{"type": "file", "path": p, "size": len(b), "oid": _blob(b)} for p, b in files])

    def resolve(self, content: bytes, repo: str, revision: str, file: str) -> None:
        if (found := self._repository(repo, revision, content=True)) is None:
            return None
        repository, commit = found
        body = repository.commits[commit].get(file)
        if body is None:
            return self._send(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        return self._send(200, body, ETag=f'"{_blob(body)}"', X_Repo_Commit=commit, Accept_Ranges="bytes")

    def preupload(self, content: bytes, repo: str, revision: str) -> None:
        if self._repository(repo, revision, content=False) is None:
            return
        paths = [file["path"] for file in json.loads(content)["files"]]
        modes = {True: "lfs", False: "regular"}
        files = [
            {"path": p, "uploadMode": modes[p.endswith((".safetensors", ".png"))], "shouldIgnore": False} for p in paths
        ]
        self._send(200, {"files": files})

    def batch(self, content: bytes, repo: str) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}}
            for each in json.loads(content)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def upload(self, content: bytes, oid: str) -> None:
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._send(200, b"")

    def commit(self, content: bytes, repo: str, revision: str) -> None:
        if (found := self._repository(repo, revision, content=False)) is None:
            return
        changes: dict[str, bytes | None] = {}
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                changes[value["path"]] = None
        oid = found[0].commit(changes)
        self._send(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.address}/{repo}/commit/{oid}"})


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES = (
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/validate-yaml", "validate"),
    ("POST", "/api/repos/create", "create"),
    ("GET", f"/api/models/{_REPO}", "info"),
    ("GET", f"/api/models/{_REPO}/revision/(?P<revision>.+)", "info"),
    ("GET", f"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", "tree"),
    ("POST", f"/api/models/{_REPO}/preupload/(?P<revision>.+)", "preupload"),
    ("POST", f"/api/models/{_REPO}/commit/(?P<revision>.+)", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "upload"),
    ("*", f"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def client_of(hub: Hub, cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let the hub's client in this process use a server, an empty cache and no token."""
    with pytest.MonkeyPatch.context() as patch:
        constants = huggingface_hub.constants
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has the older protocol of large files
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        yield patch
