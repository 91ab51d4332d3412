"""Local stand-in for the Hub, with the HTTP endpoints that huggingface_hub and datasets use.

Repositories are kept in memory. As on the Hub, small files are part of the commit and large files use the LFS
protocol.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import yaml

LARGE = (".safetensors", ".png", ".parquet", ".arrow", ".bin")
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "other", "openrail"}
TOKEN = "hf_" + "testtoken" * 4


@dataclass(frozen=True)
class File:
    content: bytes
    is_large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_sha1(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, File], message: str) -> str:
        text = f"{len(self.commits)}{message}" + "".join(
            f"{name}{file.sha256}" for name, file in sorted(files.items())
        )
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        return (
            self.branches.get(revision) or self.tags.get(revision) or (revision if revision in self.commits else None)
        )


class Hub:
    """Server state, which tests can inspect and change."""

    def __init__(self, url: str):
        self.url = url
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        """sha256 of each uploaded LFS object, in order."""
        self.downloads: list[tuple[str, int]] = []
        """(repository and path, number of bytes) for each download, in order."""
        self.before_upload: Callable[[str], None] = lambda sha256: None
        """Called with an LFS object's sha256 before the object is received."""

    @property
    def environment(self) -> dict[str, str]:
        """Returns environment variables that make a command use this server."""
        patience = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # this process may be slow
        return patience | {
            "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN
        }  # fmt: skip

    def files(self, name: str, revision: str = "main", kind: str = "models") -> dict[str, File]:
        repository = self.repositories[kind, name]
        return repository.commits[repository.resolve(revision)]

    def add(self, kind: str, name: str, folder: Path) -> None:
        """Creates a repository with a folder's files on the main branch."""
        repository = self.create(kind, name, private=False)
        files = {
            str(path.relative_to(folder)): File(path.read_bytes(), path.name.endswith(LARGE))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repository.commit("main", repository.commits[repository.branches["main"]] | files, "files")

    def create(self, kind: str, name: str, private: bool) -> Repository:
        repository = self.repositories[kind, name] = Repository(private)
        repository.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit")
        return repository


class Failure(Exception):
    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


NAME = r"(?P<name>[\w.-]+(?:/[\w.-]+)?)"
KIND = r"(?P<kind>models|datasets)"
ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create_repository"),
    ("GET", rf"/api/{KIND}/{NAME}/refs", "refs"),
    ("GET", rf"/api/{KIND}/{NAME}/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", "tree"),
    ("POST", rf"/api/{KIND}/{NAME}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("POST", rf"/api/{KIND}/{NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/{KIND}/{NAME}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/api/{KIND}/{NAME}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("GET", rf"/api/{KIND}/{NAME}(?:/revision/(?P<revision>[^/]+))?", "information"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<sha256>\w+)", "lfs_upload"),
    ("POST", r"/lfs/verify", "lfs_verify"),
    ("GET", rf"/(?P<prefix>datasets/)?{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "download"),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Disables logging, because log lines would mix with the output of the command under test."""

    def do_GET(self) -> None:
        self.answer("GET")

    def do_HEAD(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    def answer(self, method: str) -> None:
        url = urlparse(self.path)
        self.query = parse_qs(url.query)
        try:
            for route_method, pattern, name in ROUTES:
                if route_method == method and (match := re.fullmatch(pattern, url.path)):
                    arguments = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    if name == "lfs_upload":
                        self.hub.before_upload(arguments["sha256"])
                    self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    getattr(self, name)(**arguments)
                    return
            raise Failure(404, f"no such route: {method} {url.path}")
        except Failure as failure:
            self.send(json.dumps({"error": str(failure)}).encode(), failure.status, {"X-Error-Code": failure.code})
        except ConnectionError:
            self.close_connection = True

    def send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, value: object, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status)

    def is_known_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def require_user(self) -> None:
        if not self.is_known_user():
            raise Failure(401, "Invalid username or password.")

    def repository(self, kind: str, name: str) -> Repository:
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not self.is_known_user()):
            raise Failure(404, "Repository not found", "RepoNotFound")
        return repository

    def resolve(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self.repository(kind, name)
        sha = repository.resolve(revision)
        if sha is None:
            raise Failure(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repository.commits[sha]

    def whoami(self) -> None:
        self.require_user()
        self.send_json({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate_yaml(self) -> None:
        """Checks for readable metadata, a known license and complete evaluation results."""
        content = json.loads(self.body)["content"]
        metadata = yaml.safe_load(content.split("---")[1])
        errors = []
        if metadata.get("license", "other") not in LICENSES:
            errors.append(f'"license" must be one of {sorted(LICENSES)}')
        for entry in metadata.get("model-index") or []:
            for result in entry["results"]:
                if not {"type"} <= result["task"].keys() or not {"name", "type"} <= result["dataset"].keys():
                    errors.append('"model-index" has an incomplete result')
                if any(not {"type", "value"} <= metric.keys() for metric in result["metrics"]):
                    errors.append('"model-index" has an incomplete metric')
        if errors:
            raise Failure(400, "; ".join(errors))
        self.send_json({"errors": [], "warnings": []})

    def create_repository(self) -> None:
        self.require_user()
        asked = json.loads(self.body)
        owner, name = asked.get("organization") or "me", asked["name"]
        if owner != "me":
            raise Failure(403, f"You don't have the rights to create a model under the namespace {owner}")
        kind, full_name = f"{asked.get('type') or 'model'}s", f"{owner}/{name}"
        url = {"url": f"{self.hub.url}/{full_name}", "name": full_name, "id": full_name}
        if (kind, full_name) in self.hub.repositories:
            self.send_json({"error": "You already created this model repo", **url}, 409)
            return
        self.hub.create(kind, full_name, bool(asked.get("private") or asked.get("visibility") == "private"))
        self.send_json(url)

    def refs(self, kind: str, name: str) -> None:
        repository = self.repository(kind, name)

        def listed(references: dict[str, str], where: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{where}/{n}", "targetCommit": sha} for n, sha in references.items()]

        self.send_json(
            {"branches": listed(repository.branches, "heads"), "tags": listed(repository.tags, "tags"), "converts": []}
        )

    def information(self, kind: str, name: str, revision: str = "main") -> None:
        sha, files = self.resolve(kind, name, revision)
        self.send_json(
            {
                "id": name,
                "sha": sha,
                "private": self.repository(kind, name).private,
                "disabled": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def tree(self, kind: str, name: str, revision: str, path: str = "") -> None:
        _, files = self.resolve(kind, name, revision)
        prefix = f"{path}/" if path else ""
        inside = [p for p in files if p.startswith(prefix)]
        if path and not inside:
            raise Failure(404, f"{path} does not exist", "EntryNotFound")
        entries = [self.entry(p, files[p]) for p in inside]
        folders = {str(parent) for p in inside for parent in Path(p).parents if str(parent) not in (".", path)}
        entries += [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in sorted(folders)]
        if self.query.get("recursive", ["false"])[0].lower() not in ("1", "true"):
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(prefix)]
        self.send_json(entries)

    def paths_info(self, kind: str, name: str, revision: str) -> None:
        _, files = self.resolve(kind, name, revision)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode())["paths"]
        paths = [paths] if isinstance(paths, str) else paths
        folders = {str(parent) for path in files for parent in Path(path).parents}
        entries = [self.entry(path, files[path]) for path in paths if path in files]
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in paths if path in folders]
        self.send_json(entries)

    def entry(self, path: str, file: File) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(file.content), "oid": file.git_sha1}
        if file.is_large:
            entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}
        return entry

    def preupload(self, kind: str, name: str, revision: str) -> None:
        self.require_user()
        _, files = self.resolve(kind, name, revision)
        answers = []
        for asked in json.loads(self.body)["files"]:
            is_large, there = asked["path"].endswith(LARGE), files.get(asked["path"])
            oid = None if there is None else (there.sha256 if is_large else there.git_sha1)
            mode = "lfs" if is_large else "regular"
            answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": answers})

    def lfs_batch(self, name: str) -> None:
        self.require_user()
        answers = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.url}/lfs/{wanted['oid']}", "header": {}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/verify"}}
            answers.append(answer)
        self.send_json({"transfer": "basic", "objects": answers})

    def lfs_upload(self, sha256: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise Failure(422, "the object doesn't match its sha256")
        self.hub.objects[sha256] = self.body
        self.hub.uploads.append(sha256)
        self.send(b"")

    def lfs_verify(self) -> None:
        wanted = json.loads(self.body)
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Failure(404, "the object was not found")
        self.send_json({})

    def commit(self, kind: str, name: str, revision: str) -> None:
        self.require_user()
        _, files = self.resolve(kind, name, revision)
        repository, files, message = self.repository(kind, name), dict(files), ""
        for line in self.body.decode().splitlines():
            value = json.loads(line)["value"]
            match json.loads(line)["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = File(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    files[value["path"]] = File(self.hub.objects[value["oid"]], True)
                case "deletedFile":
                    del files[value["path"]]
        sha = repository.commit(revision, files, message)
        self.send_json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def create_branch(self, kind: str, name: str, branch: str) -> None:
        self.require_user()
        repository = self.repository(kind, name)
        if branch in repository.branches:
            raise Failure(409, "Reference already exists")
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repository.branches[branch] = self.resolve(kind, name, start)[0]
        self.send_json({})

    def download(self, name: str, revision: str, path: str, prefix: str = "") -> None:
        sha, files = self.resolve("datasets" if prefix else "models", name, revision)
        if path not in files:
            raise Failure(404, "Entry not found", "EntryNotFound")
        file = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.sha256 if file.is_large else file.git_sha1}"'}
        headers["Content-Type"] = "application/octet-stream"
        content, status = file.content, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        if self.command == "GET":
            self.hub.downloads.append((f"{name}/{path}", len(content)))
        self.send(content, status, {**headers, "Content-Length": str(len(content))})


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Runs the server on a free local port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {}))
    server.daemon_threads = True
    hub = server.RequestHandlerClass.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
