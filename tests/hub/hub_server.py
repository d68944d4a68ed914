"""A hub for tests: bare git repositories behind the part of the hub's HTTP API that its client uses.

Large files are kept as on the hub: a pointer in git, and the content in LFS storage or, with Xet, in a folder
that hf_xet reads and writes by itself. Tests tell the server to fail with `Fault`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

ATTRIBUTES = (
    b"*.onnx filter=lfs diff=lfs merge=lfs -text\n*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
MODEL = r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Fault:
    """What goes wrong with the next `times` requests of this method whose path matches.

    Attributes
    ----------
    status : int
        Answered instead; 0 answers as ever, but for what follows.
    cut, stall : int or None
        The connection is closed, or nothing more is sent for `stall_s`, after this many bytes of the body.
        A stall of 0 begins before the status is sent.
    change : callable, optional
        Makes another body of the same length.
    reached : threading.Event
        Set when a request came.
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall: int | None = None
    stall_s: float = 30.0
    change: Callable[[bytes], bytes] | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class Hub(ThreadingHTTPServer):
    """The server; `requests` lists what was asked, and `faults` what goes wrong.

    Repositories in `renamed` are found under their new names, and all addresses begin with `prefix`.
    """

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave when they have had enough; anything else is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def __init__(self, root: Path, *, xet: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.xet = root, xet
        self.requests: list[tuple[str, str]] = []
        self.connections: list[socket.socket] = []
        self.faults: list[Fault] = []
        self.tokens: dict[str, str] = {"writer": "write", "reader": "read"}
        self.private: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.prefix = ""
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.trees: dict[tuple[str, str], dict[str, str]] = {}
        self.blobs: dict[str, bytes] = {}
        (root / "lfs").mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.prefix}"

    @contextmanager
    def running(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Go down: connections that clients keep open are cut as well."""
        self.stopped.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    # -- git ------------------------------------------------------------------------------------------------

    def git(self, repo: str, *arguments: str, data: bytes | None = None) -> bytes:
        command = ["git", "--git-dir", str(self.root / f"{repo}.git"), *arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root)}
        return subprocess.run(command, input=data, check=True, capture_output=True, env=environment).stdout

    def repos(self) -> list[str]:
        return sorted(str(p.relative_to(self.root).with_suffix("")) for p in self.root.glob("*/*.git"))

    def create(self, repo: str) -> None:
        (self.root / repo).parent.mkdir(exist_ok=True)
        self.git(repo, "init", "--bare", "--template=", "--initial-branch=main")
        self.commit(repo, "initial commit", {".gitattributes": ATTRIBUTES}, [])

    def resolve(self, repo: str, revision: str) -> str | None:
        """Commit of a revision; None if there is none."""
        if (repo, revision) in self.trees:
            return revision
        try:
            return self.git(repo, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
        except subprocess.CalledProcessError:
            return None

    def files(self, repo: str, commit: str) -> dict[str, str]:
        """Blob of each file; kept, since a commit never changes."""
        if (repo, commit) not in self.trees:
            lines = self.git(repo, "ls-tree", "-r", "-z", commit).decode().split("\0")
            pairs = (line.split("\t") for line in lines if line)
            self.trees[repo, commit] = {name: about.split()[2] for about, name in pairs}
        return self.trees[repo, commit]

    def blob(self, repo: str, oid: str) -> bytes:
        if oid not in self.blobs:
            self.blobs[oid] = self.git(repo, "cat-file", "blob", oid)
        return self.blobs[oid]

    def commit(self, repo: str, message: str, added: dict[str, bytes], deleted: list[str]) -> str:
        """Commit to the branch main, in one process: tests make hundreds of commits."""
        parts = [b"commit refs/heads/main\nmark :1\ncommitter hub <hub@test> now\n", _data(message.encode())]
        if self.resolve(repo, "main"):
            parts.append(b"from refs/heads/main^0\n")
        parts += [f"D {json.dumps(name, ensure_ascii=False)}\n".encode() for name in deleted]
        for name, data in added.items():
            parts += [f"M 100644 inline {json.dumps(name, ensure_ascii=False)}\n".encode(), _data(data)]
        parts.append(b"get-mark :1\n")
        made = self.git(repo, "fast-import", "--quiet", "--date-format=now", data=b"".join(parts))
        return made.decode().strip()

    def publish(self, repo: str, folder: Path) -> str:
        """Commit a folder, without the client."""
        if repo not in self.repos():
            self.create(repo)
        added = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            data = path.read_bytes()
            if path.suffix in (".onnx", ".safetensors"):
                oid = hashlib.sha256(data).hexdigest()
                (self.root / "lfs" / oid).write_bytes(data)
                data = POINTER.format(oid=oid, size=len(data)).encode()
            added[path.relative_to(folder).as_posix()] = data
        return self.commit(repo, "published", added, [])

    # -- large files -----------------------------------------------------------------------------------------

    def pointed(self, data: bytes) -> tuple[str, int] | None:
        """Hash and size of the file that a pointer stands for."""
        match = re.fullmatch(rb"version https://git-lfs\S+\noid sha256:([0-9a-f]{64})\nsize (\d+)\n", data)
        return (match[1].decode(), int(match[2])) if match else None

    def large(self, oid: str) -> bytes:
        """Content of a large file."""
        stored = self.root / "lfs" / oid
        if not stored.exists():
            self._fetch_from_xet(oid, stored)
        return stored.read_bytes()

    def _fetch_from_xet(self, oid: str, to: Path) -> None:
        import hf_xet

        info = hf_xet.XetFileInfo(self.xet_hashes()[oid], None)
        with hf_xet.XetSession().new_file_download_group(endpoint=self.cas) as group:
            group.start_download_file(info, str(to))

    @property
    def cas(self) -> str:
        return f"local://{self.root / 'cas'}"

    def xet_hashes(self) -> dict[str, str]:
        """Xet hash of each uploaded file by its sha256, from the shards that hf_xet has written."""
        found = {}
        for shard in (self.root / "cas").glob("xet/xorbs/shards/*.mdb"):
            found |= dict(_files_of_shard(shard.read_bytes()))
        return found


def _data(content: bytes) -> bytes:
    """As `git fast-import` reads it."""
    return b"data %d\n%s\n" % (len(content), content)


def _files_of_shard(shard: bytes) -> Iterator[tuple[str, str]]:
    """sha256 and Xet hash of the files in a shard: records of 48 bytes behind a header of as many."""
    at = 48
    while shard[at : at + 32] != b"\xff" * 32:
        xet_hash = _hash_text(shard[at : at + 32])
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        at += 48 * (1 + segments * (2 if flags & 1 << 31 else 1))
        if flags & 1 << 30:
            yield _hash_text(shard[at : at + 32]), xet_hash
            at += 48


def _hash_text(raw: bytes) -> str:
    """Xet writes hashes as four little-endian words."""
    return "".join(raw[i : i + 8][::-1].hex() for i in range(0, 32, 8))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or else a body waits 40 ms for its headers to be acknowledged
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.route, self.query = unquote(url.path.removeprefix(self.server.prefix)), parse_qs(url.query)
        self.server.requests.append((self.command, self.route))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self._chunks())
        self.fault = None
        with self.server.lock:
            for fault in self.server.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, self.route):
                    fault.times -= 1
                    self.fault = fault
                    break
        if self.fault is not None:
            self.fault.reached.set()
            if self.fault.status:
                self.send(self.fault.status, {"error": "told to fail"}, self.fault.headers)
                return
        for old, new in self.server.renamed.items():
            if f"/{old}/" in self.route:
                self.send(307, b"", {"Location": self.path.replace(old, new)})
                return
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, self.route)
            if match and self.command in method.split():
                if self.allowed(match.groupdict().get("repo")):
                    with self.server.lock:
                        found = handle(self, **match.groupdict())
                    self.send(*found)
                return
        self.send(404, {"error": f"no such route: {self.command} {self.route}"})

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def allowed(self, repo: str | None) -> bool:
        """Check the token, as the hub does: without a right to see a repository, it does not exist."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        given = given or self.query.get("token", [""])[0]  # of an address to store a large file at
        right = self.server.tokens.get(given)
        if given and right in (None, "expired"):
            said = "User Access Token has expired" if right else "Invalid credentials in Authorization header"
            self.send(401, {"error": said}, {"X-Error-Message": said})
        elif repo in self.server.private and not right:
            self.send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif repo and repo not in self.server.repos():
            self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif self.command in ("POST", "PUT") and "validate-yaml" not in self.route and right != "write":
            said = "you need a token with write access"
            self.send(403 if right else 401, {"error": said}, {"X-Error-Message": said})
        else:
            return True
        return False

    def send(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = dict(headers or {})
        start = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
            if status == 200 and start:
                status = 206
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        fault = self.fault
        if fault is not None and fault.change is not None:
            data = fault.change(data)
        if fault is not None and fault.stall == 0:
            self.server.stopped.wait(fault.stall_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(data)
        if fault is not None and (part := fault.cut if fault.cut is not None else fault.stall) is not None:
            end = part
            self.close_connection = True
        try:
            self.wfile.write(data[start:end])
            self.wfile.flush()
            if fault is not None and fault.stall is not None:
                self.server.stopped.wait(fault.stall_s)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def _create(on: _Handler) -> Answer:
    asked = json.loads(on.body)
    repo = f"{asked['organization'] or 'writer'}/{asked['name']}"
    url = {"url": f"{on.server.url}/{repo}"}
    if repo in on.server.repos():
        return 409, {"error": "You already created this model repo", **url}
    on.server.create(repo)
    return 200, url


def _validate(on: _Handler) -> Answer:
    """The rules of the hub's metadata that a card of weights can break."""
    match = re.match(r"---\n(.*?)\n---\n", json.loads(on.body)["content"], re.DOTALL)
    problems = []
    try:
        meta = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        meta = None
        problems.append(str(error))
    if match and not isinstance(meta, dict):
        problems.append("the metadata is no mapping")
    elif isinstance(meta, dict):
        if not isinstance(meta.get("tags", []), list):
            problems.append('"tags" must be an array')
        for model in meta.get("model-index", []):
            for result in model.get("results") or [None]:
                dataset = (result or {}).get("dataset", {})
                if (
                    not result
                    or not {"type", "name"} <= dataset.keys()
                    or "type" not in result.get("task", {})
                ):
                    problems.append('"model-index[0].results[0]" lacks its task or dataset')
                elif not all({"type", "value"} <= metric.keys() for metric in result.get("metrics", [])):
                    problems.append('"model-index[0].results[0].metrics[0]" lacks its type or value')
    warnings = [] if match else [{"message": "empty or missing yaml metadata in repo card"}]
    errors = [{"message": problem} for problem in problems]
    return 400 if errors else 200, {"errors": errors, "warnings": warnings}


def _preupload(on: _Handler, repo: str, revision: str) -> Answer:
    commit = on.server.resolve(repo, revision)
    there = on.server.files(repo, commit) if commit else {}
    files = []
    for asked in json.loads(on.body)["files"]:
        name = asked["path"]
        large = Path(name).suffix in (".onnx", ".safetensors") or b"\0" in base64.b64decode(asked["sample"])
        oid = there.get(name)
        if oid and large and (pointed := on.server.pointed(on.server.blob(repo, oid))):
            oid = pointed[0]
        mode = "lfs" if large else "regular"
        files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return 200, {"files": files}


def _batch(on: _Handler, repo: str) -> Answer:
    objects = []
    for asked in json.loads(on.body)["objects"]:
        oid = asked["oid"]
        answer = {"oid": oid, "size": asked["size"]}
        if not (on.server.root / "lfs" / oid).exists():
            token = {"header": {"Authorization": on.headers["Authorization"]}}
            answer["actions"] = {
                "upload": {"href": f"{on.server.url}/lfs/{oid}?token=writer"},
                "verify": {"href": f"{on.server.url}/{repo}.git/info/lfs/verify", **token},
            }
        objects.append(answer)
    return 200, {"transfer": "basic", "objects": objects}


def _store(on: _Handler, oid: str) -> Answer:
    if hashlib.sha256(on.body).hexdigest() != oid:
        return 400, {"error": "the content has another sha256"}
    (on.server.root / "lfs" / oid).write_bytes(on.body)
    return 200, b""


def _verify(on: _Handler, repo: str) -> Answer:
    asked = json.loads(on.body)
    stored = on.server.root / "lfs" / asked["oid"]
    return (
        (200, b"")
        if stored.exists() and stored.stat().st_size == asked["size"]
        else (404, {"error": "absent"})
    )


def _commit(on: _Handler, repo: str, revision: str) -> Answer:
    head = on.server.resolve(repo, "main")
    added, deleted, summary = {}, [], ""
    for line in on.body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            summary = value["summary"]
            if value.get("parentCommit", head) != head:
                said = "A commit has happened since. Please refresh and try again."
                return 412, {"error": said}
        elif item["key"] == "file":
            added[value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            known = (on.server.root / "lfs" / value["oid"]).exists() or value["oid"] in on.server.xet_hashes()
            if not known:
                return 400, {"error": f"{value['path']}: its LFS object was not uploaded"}
            added[value["path"]] = POINTER.format(**value).encode()
        else:
            deleted.append(value["path"])
    oid = on.server.commit(repo, summary, added, deleted)
    return 200, {"success": True, "commitOid": oid, "commitUrl": f"{on.server.url}/{repo}/commit/{oid}"}


def _info(on: _Handler, repo: str, revision: str = "main") -> Answer:
    commit = on.server.resolve(repo, revision)
    if commit is None:
        return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
    files = on.server.files(repo, commit)
    meta = {}
    if "README.md" in files:
        text = on.server.blob(repo, files["README.md"]).decode()
        if match := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL):
            meta = yaml.safe_load(match[1])
    tags = [*meta.get("tags", []), *([meta["library_name"]] if "library_name" in meta else [])]
    siblings = [{"rfilename": name} for name in files]
    about = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": tags}
    return 200, {**about, "cardData": meta, "private": repo in on.server.private, "downloads": 0, "likes": 0}


def _list(on: _Handler) -> Answer:
    found = []
    for repo in on.server.repos():
        info = _info(on, repo)[1]
        wanted = on.query.get("filter", [])
        if repo.split("/")[0] in on.query.get("author", [repo.split("/")[0]]) and set(wanted) <= set(
            info["tags"]
        ):
            found.append(info)
    return 200, found


def _tree(on: _Handler, repo: str, revision: str) -> Answer:
    commit = on.server.resolve(repo, revision)
    if commit is None:
        return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
    entries = []
    for name, oid in on.server.files(repo, commit).items():
        data = on.server.blob(repo, oid)
        entry: dict[str, Any] = {"type": "file", "oid": oid, "size": len(data), "path": name}
        if pointed := on.server.pointed(data):
            entry |= {
                "size": pointed[1],
                "lfs": {"oid": pointed[0], "size": pointed[1], "pointerSize": len(data)},
            }
        entries.append(entry)
    return 200, entries


def _refs(on: _Handler, repo: str) -> Answer:
    lines = on.server.git(repo, "for-each-ref", "--format=%(refname) %(objectname)").decode().splitlines()
    refs = [dict(zip(("ref", "targetCommit"), line.split(), strict=True)) for line in lines]
    named = [{**ref, "name": ref["ref"].split("/", 2)[2]} for ref in refs]
    kinds = {"branches": "refs/heads/", "tags": "refs/tags/"}
    found = {kind: [ref for ref in named if ref["ref"].startswith(start)] for kind, start in kinds.items()}
    return 200, {**found, "converts": []}


def _tag(on: _Handler, repo: str, revision: str) -> Answer:
    tag = json.loads(on.body)["tag"]
    if on.server.resolve(repo, f"refs/tags/{tag}"):
        return 409, {"error": "Tag reference exists already"}
    commit = on.server.resolve(repo, revision)
    if commit is None:
        return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
    on.server.git(repo, "update-ref", f"refs/tags/{tag}", commit)
    return 200, b""


def _file(on: _Handler, repo: str, revision: str, name: str) -> Answer:
    commit = on.server.resolve(repo, revision)
    if commit is None:
        return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
    headers = {"X-Repo-Commit": commit}
    oid = on.server.files(repo, commit).get(name)
    if oid is None:
        return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", **headers}
    data = on.server.blob(repo, oid)
    pointed = on.server.pointed(data)
    if pointed is None:
        return 200, data, {**headers, "ETag": f'"{oid}"'}
    sha256, size = pointed
    headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(size)}
    if on.server.xet:
        headers["X-Xet-Hash"] = on.server.xet_hashes()[sha256]
        headers["X-Xet-Refresh-Route"] = f"{on.server.url}/api/models/{repo}/xet-read-token/{commit}"
        if on.command == "HEAD":
            return 200, b"", headers
    # Another name for the same host: the client follows redirects to its own before it looks at the headers.
    headers["Location"] = f"http://localhost:{on.server.server_port}/lfs/{sha256}"
    return 302, b"", headers


def _large(on: _Handler, oid: str) -> Answer:
    return 200, on.server.large(oid), {"ETag": f'"{oid}"'}


def _xet_token(on: _Handler, repo: str, revision: str) -> Answer:
    if not on.server.xet:
        return 404, {"error": "Xet is off"}
    expiry = int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": on.server.cas,
        "X-Xet-Access-Token": "xet",
        "X-Xet-Token-Expiration": str(expiry),
    }
    return 200, {"casUrl": on.server.cas, "accessToken": "xet", "exp": expiry}, headers


ROUTES: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate),
    ("GET", "/api/models", _list),
    ("GET", MODEL, _info),
    ("GET", rf"{MODEL}/revision/(?P<revision>.+)", _info),
    ("GET", rf"{MODEL}/tree/(?P<revision>[^/]+)", _tree),
    ("GET", rf"{MODEL}/refs", _refs),
    ("POST", rf"{MODEL}/tag/(?P<revision>.+)", _tag),
    ("POST", rf"{MODEL}/preupload/(?P<revision>.+)", _preupload),
    ("POST", rf"{MODEL}/commit/(?P<revision>.+)", _commit),
    ("GET", rf"{MODEL}/xet-(?:read|write)-token/(?P<revision>.+)", _xet_token),
    ("POST", r"/(?P<repo>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", _batch),
    ("POST", r"/(?P<repo>[\w.-]+/[\w.-]+)\.git/info/lfs/verify", _verify),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", _store),
    ("GET HEAD", "/lfs/(?P<oid>[0-9a-f]{64})", _large),
    ("GET HEAD", r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _file),
)
