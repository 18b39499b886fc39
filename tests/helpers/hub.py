"""A small server that speaks the Hub's upload calls (create, preupload, LFS batch, PUT, commit), for tests on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["FakeHub", "serve_hub"]


class FakeHub:
    """What was created, uploaded and committed."""

    def __init__(self) -> None:
        self.repositories: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.refuse = False
        self.address = ""


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, content: Any, status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            body = self.body()
            if hub.refuse:
                self.answer({"error": "You don't have the rights"}, 403)
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                hub.repositories.append(name)
                self.answer({"url": f"{hub.address}/{name}", "id": name})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for f in files
                ]
                self.answer({"files": modes})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                upload = [{**o, "actions": {"upload": {"href": f"{hub.address}/lfs/{o['oid']}"}}} for o in objects]
                self.answer({"transfer": "basic", "objects": upload})
            elif "/commit/" in self.path:
                self.commit([json.loads(line) for line in body.splitlines() if line.strip()])
            else:
                self.answer({"error": f"unknown {self.path}"}, 404)

        def do_PUT(self) -> None:
            data = self.body()
            assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
            hub.objects[self.path.rpartition("/")[2]] = data
            self.answer({})

        def do_GET(self) -> None:
            self.answer({"error": "not found"}, 404)

        def commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
                elif line["key"] == "header":
                    hub.commits.append(value["summary"])
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            url = f"{hub.address}/{repository}/commit/{'c' * 40}"
            self.answer({"success": True, "commitOid": "c" * 40, "commitUrl": url, "hookOutput": ""})

    return Handler


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """A hub on the loopback interface, for the length of the context."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
