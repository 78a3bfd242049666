"""A stand-in for the W&B server on this machine, for W&B's own client: GraphQL, streams of runs, uploads.

The server keeps the runs and artifacts that it receives in memory. It has no accounts and checks no keys.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterable
from http.server import ThreadingHTTPServer
from typing import Any

from tests.hub_server import JsonHandler

_ENTITY = "somebody"
_STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")
_HISTORY, _SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclasses.dataclass
class ReceivedRun:
    """A run that the server has received.

    Attributes:
        fields: Variables of the GraphQL operation UpsertBucket, such as "displayName".
        lines: {name of a streamed file: {line number, from 0: text}}.
        files: {name of an uploaded file: content}.
        exit_code: Exit code of the run. None while it runs.
    """

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    lines: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in sorted(self.lines.get(_HISTORY, {}).items())]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.lines.get(_SUMMARY)
        return json.loads(lines[max(lines)]) if lines else {}

    @property
    def config(self) -> dict[str, Any]:
        values = json.loads(self.fields.get("config") or "{}")
        return {name: each["value"] for name, each in values.items() if name != "_wandb"}


@dataclasses.dataclass
class ReceivedArtifact:
    """A version of an artifact that the server has received. Its files are complete if `is_committed`."""

    type: str
    name: str
    version: int
    digest: str
    aliases: set[str]
    metadata: dict[str, Any]
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_committed: bool = False


class WandbServer:
    """A context manager that runs the server. `stop`, then `start` restart it under the same address.

    unanswered: GraphQL operations that get an empty answer, as a proxy or an older server may give.
    """

    def __init__(self, *, unanswered: Iterable[str] = ()):
        self.unanswered = set(unanswered)
        self.runs: dict[str, ReceivedRun] = {}
        self.artifacts: list[ReceivedArtifact] = []
        self.views: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._port = 0

    def __enter__(self) -> WandbServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which the W&B client finds this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.state = self
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stops the server and closes its open connections, as if the network was lost."""
        self._server.shutdown()
        self._server.server_close()
        self._server.close_connections()

    def versions(self, name: str) -> list[ReceivedArtifact]:
        return [each for each in self.artifacts if each.name == name and each.is_committed]

    def content(self, artifact: ReceivedArtifact) -> dict[str, bytes]:
        """Returns {path: content} of the files of an artifact."""
        contents = artifact.manifest["contents"]
        return {path: self.uploads[entry["digest"]] for path, entry in contents.items()}

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        handler = getattr(self, f"_{operation}", None)
        return {} if handler is None or operation in self.unanswered else handler(variables)

    def _project(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("project") or variables.get("projectName") or "uncategorized"
        return {"id": "project", "name": name, "entity": {"id": "entity", "name": _ENTITY}}

    def _Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "user", "entity": _ENTITY, "username": _ENTITY, "flags": "{}"}}

    _GetDefaultEntity = _Viewer

    def _UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(variables["name"], ReceivedRun())
        run.fields.update({key: value for key, value in variables.items() if value is not None})
        bucket = self._bucket(variables["name"], run) | {"project": self._project(variables)}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        return {"model": {**self._project(variables), "bucket": run and self._bucket(variables["name"], run)}}

    def _bucket(self, name: str, run: ReceivedRun) -> dict[str, Any]:
        counts = {
            f"{kind}LineCount": len(run.lines.get(file, ()))
            for kind, file in (("history", _HISTORY), ("events", "wandb-events.jsonl"), ("log", "output.log"))
        }
        last = [json.dumps(row) for row in run.history[-1:]]
        texts = {"historyTail": json.dumps(last), "eventsTail": "[]", "wandbConfig": '{"t": 1}'}
        texts |= {"summaryMetrics": json.dumps(run.summary), "config": run.fields.get("config") or "{}"}
        named = {"id": "id", "name": name, "displayName": run.fields.get("displayName")}
        return {**named, **counts, **texts, "tags": run.fields.get("tags") or []}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/run_file/{variables['run']}/{name}"}
            for name in variables["files"]
        ]
        return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}

    def _ArtifactType(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"].partition(":")[0]
        types = [{"artifactType": {"name": each.type}} for each in self.artifacts if each.name == name]
        return {"project": {"artifact": types[0] if types else None}}

    def _CreateArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        values = variables["input"]
        name = values["artifactCollectionName"]
        older = [each for each in self.artifacts if each.name == name]
        same = [each for each in older if each.digest == values["digest"]]
        if not same:
            metadata = json.loads(values.get("metadata") or "{}")
            kind, digest = values["artifactTypeName"], values["digest"]
            self.artifacts.append(ReceivedArtifact(kind, name, len(older), digest, set(), metadata))
        artifact = same[0] if same else self.artifacts[-1]
        aliases = {each["alias"] for each in values.get("aliases") or []}
        for each in older:
            each.aliases -= aliases  # an alias is of one version
        artifact.aliases |= aliases
        state = "COMMITTED" if artifact.is_committed else "PENDING"
        identity = {"id": str(self.artifacts.index(artifact)), "digest": artifact.digest, "state": state}
        latest = {"id": "latest", "versionIndex": artifact.version}
        sequence = {"id": name, "name": name, "latestArtifact": latest if same else None}
        return {"createArtifact": {"artifact": {**identity, "artifactSequence": sequence}}}

    def _CreateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        number = variables["artifactID"]
        url = f"{self.url}/manifest/{number}"
        file = {"id": "file", "uploadUrl": url, "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": number, "file": file}}}

    def _CreateArtifactFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        values = variables["input"]
        edges = []
        for number, each in enumerate(values["artifactFiles"]):
            file = {"storagePath": each["name"], "artifact": {"id": each["artifactID"]}}
            upload = {"uploadUrl": f"{self.url}/artifact_file/{number}", "uploadHeaders": []}
            edges.append({"node": file | upload})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _CommitArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        artifact = self.artifacts[int(variables["artifactID"])]
        artifact.is_committed = True
        return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": artifact.digest}}}

    def _UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables)
        return {"upsertView": {"view": {"id": "view", "name": variables["name"]}, "inserted": True}}

    def upload(self, path: str, content: bytes) -> None:
        kind, _, rest = path.strip("/").partition("/")
        if kind == "run_file":
            run, _, name = rest.partition("/")
            self.runs[run].files[name] = content
        elif kind == "manifest":
            self.artifacts[int(rest)].manifest = json.loads(content)
        else:  # of an artifact, known by its MD5
            self.uploads[_md5(content)] = content

    def stream(self, name: str, received: dict[str, Any]) -> None:
        run = self.runs.setdefault(name, ReceivedRun())
        for file, part in (received.get("files") or {}).items():
            lines = run.lines.setdefault(file, {})
            lines.update(enumerate(part["content"], part["offset"]))
        if received.get("complete"):
            run.exit_code = received.get("exitcode")


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content).digest()).decode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256  # the client uploads many files at once, and waits after a connection is refused
    state: WandbServer

    def __init__(self, *arguments: Any):
        self._connections: list[Any] = []
        super().__init__(*arguments)

    def get_request(self) -> Any:
        found = super().get_request()
        self._connections.append(found[0])
        return found

    def close_connections(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        pass  # a client that went away


class _Handler(JsonHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        with self.server.state.lock:
            self.server.state.upload(self.path, self._read())
        self._answer({})

    def do_POST(self) -> None:
        content, state, reply = self._read(), self.server.state, {}
        with state.lock:
            if self.path.endswith("/graphql"):
                asked = json.loads(content)
                operation = _OPERATION.search(asked["query"])[1]
                reply = {"data": state.answer(operation, asked.get("variables") or {})}
            elif stream := _STREAM.fullmatch(self.path):
                state.stream(stream[1], json.loads(content))
        self._answer(reply)
