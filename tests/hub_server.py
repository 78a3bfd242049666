"""A stand-in for the Hugging Face Hub on this machine, for its own client. Repositories are in memory.

The server supports what the package huggingface_hub needs to list files, download, resume a download, create
a repository, upload large files (LFS) and commit. HF_HUB_DISABLE_XET=1 stops the client from using Xet.
"""

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_REPO = r"(?P<repo>[^/]+/[^/]+)"
_INFO = re.compile(rf"/api/(?P<kind>model|dataset)s/{_REPO}(/revision/(?P<revision>[^/]+))?")
_FILE = re.compile(rf"/(?P<kind>datasets/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
_POST = re.compile(rf"/api/models/{_REPO}/(?P<action>preupload|commit)/main")
_BATCH = re.compile(rf"/{_REPO}\.git/info/lfs/objects/batch")


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".csv", ".gz", "checkpoint"))


@dataclasses.dataclass
class Repository:
    """A repository: {commit: {path: content}}, the newest commit last.

    token: If not None, the repository is private, and requests must contain this token.
    """

    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    token: str | None = None

    def commit(self, files: dict[str, bytes | None]) -> str:
        """Adds a commit. Returns its name. files: {path: new content}. The content None deletes a file."""
        newest = next(reversed(self.commits.values()), {})
        name = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        after = {**newest, **files}
        self.commits[name] = {path: content for path, content in after.items() if content is not None}
        return name

    def find(self, revision: str | None) -> str | None:
        return next(reversed(self.commits), None) if revision in (None, "main") else revision


class HubServer(ThreadingHTTPServer):
    """The server. It records GET and POST requests, and can simulate two faults.

    Attributes:
        breaks_after: Number of bytes after which the next download breaks off, or None.
        corrupts: Name of a file that is sent with a wrong last byte, or None.
    """

    daemon_threads = True
    request_queue_size = 256  # a client that finds the queue full waits for a second, or longer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        self.large_files: dict[str, bytes] = {}
        self.breaks_after: int | None = None
        self.corrupts: str | None = None
        self.token = "hf_good"  # of the one user, who owns all that is created

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Returns the environment variables with which a process uses this server. home: Its cache folder."""
        endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        own = {"HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}  # whatever the tester's shell has
        return {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **own, **more}

    def add(self, kind: str, repo: str, files: dict[str, bytes | None], *, token: str | None = None) -> str:
        repository = self.repositories.setdefault((kind, repo), Repository(token=token))
        return repository.commit(files)

    def downloads(self) -> list[str]:
        """Returns the names of the files that were downloaded since the last call of this method."""
        asked = [line for line in self.requests if line.startswith("GET") and "/resolve/" in line]
        self.requests.clear()
        return [line.rpartition("/")[2] for line in asked]


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class JsonHandler(BaseHTTPRequestHandler):
    """Base class of handlers that read the whole content of a request and answer with JSON."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _answer(self, content: dict, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(content).encode() if self.command != "HEAD" else b""
        self.send_response(status)
        described = {"Content-Type": "application/json", "Content-Length": str(len(text))}
        for key, value in {**described, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(text)


class _Handler(JsonHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self._serve_file(with_content=False)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"GET {path}")
        if match := _INFO.fullmatch(path):
            if (found := self._find(match["kind"], match["repo"], match["revision"])) is not None:
                commit, files = found
                siblings = [_describe(name, content) for name, content in files.items()]
                is_private = self.server.repositories[match["kind"], match["repo"]].token is not None
                answer = {"id": match["repo"], "sha": commit, "private": is_private, "siblings": siblings}
                self._answer(answer)
        else:
            self._serve_file(with_content=True)

    def do_POST(self) -> None:
        path, content = urlsplit(self.path).path, self._read()
        self.server.requests.append(f"POST {path}")
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self._refuse(401, "Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(content)
            repo = f"{asked['organization']}/{asked['name']}"
            if ("model", repo) in self.server.repositories:
                return self._answer({"url": f"/{repo}"}, status=409)
            token = self.server.token if asked.get("visibility") == "private" else None
            self.server.add("model", repo, {".gitattributes": b""}, token=token)
            return self._answer({"url": f"{self._endpoint()}/{repo}"})
        if match := _BATCH.fullmatch(path):
            objects = json.loads(content)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self._endpoint()}/large/{each['oid']}"}}
            return self._answer({"objects": objects})
        match = _POST.fullmatch(path)
        assert match, path
        if match["action"] == "preupload":
            modes = []
            for file in json.loads(content)["files"]:
                mode = "lfs" if _is_large(file["path"]) else "regular"
                modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            return self._answer({"files": modes})
        files = {}
        for line in content.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                files[item["value"]["path"]] = self.server.large_files[item["value"]["oid"]]
            elif item["key"] == "deletedFile":
                files[item["value"]["path"]] = None
        commit = self.server.add("model", match["repo"], files)
        url = f"{self._endpoint()}/{match['repo']}/commit/{commit}"
        self._answer({"commitUrl": url, "commitOid": commit})

    def do_PUT(self) -> None:
        content = self._read()
        self.server.large_files[hashlib.sha256(content).hexdigest()] = content
        self._answer({})

    def _endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _find(self, kind: str, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """Returns (commit, {path: content}) of a revision.

        If access is denied or the revision does not exist, sends an error to the client and returns None.
        """
        repository, given = self.server.repositories.get((kind, repo)), self.headers.get("Authorization")
        if given is not None and given != f"Bearer {self.server.token}":
            return self._refuse(401, "Invalid credentials in Authorization header")
        if repository is None or (repository.token and given != f"Bearer {repository.token}"):
            return self._refuse(401 if given is None else 404, "Repository not found", code="RepoNotFound")
        commit = repository.find(revision and unquote(revision))
        if commit not in repository.commits:
            return self._refuse(404, "Invalid rev id", code="RevisionNotFound")
        return commit, repository.commits[commit]

    def _serve_file(self, *, with_content: bool) -> None:
        match = _FILE.fullmatch(urlsplit(self.path).path)
        if match is None:
            return self._refuse(404, "Not Found")
        found = self._find("dataset" if match["kind"] else "model", match["repo"], match["revision"])
        if found is None:
            return None
        commit, files = found
        name = unquote(match["name"])
        if name not in files:
            return self._refuse(404, "Entry not found", code="EntryNotFound")
        content, status, described = files[name], 200, _describe(name, files[name])
        etag = described["lfs"]["sha256"] if "lfs" in described else described["blobId"]
        if self.server.corrupts == name:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, size = int(wanted[1]), len(content)
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            content, status = content[start:], 206
            self.server.requests.append(f"RANGE {start}")
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_content:
            limit, self.server.breaks_after = self.server.breaks_after, None
            self.wfile.write(content[:limit])
            self.close_connection = limit is not None

    def _refuse(self, status: int, message: str, *, code: str | None = None) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._answer({"error": message}, status=status, headers=headers)


def _describe(name: str, content: bytes) -> dict:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    described = {"rfilename": name, "size": len(content), "blobId": blob}
    if _is_large(name):
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return described
