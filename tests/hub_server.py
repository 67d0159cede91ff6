"""A stand-in for the Hugging Face hub: what huggingface_hub asks for to make a repository, to push and to load.

    python tests/hub_server.py 8000
    HF_ENDPOINT=http://127.0.0.1:8000 HF_TOKEN=good HF_HUB_DISABLE_XET=1 python grpo.py --push_to_hub ...

It has one user, `me`, whose token is `good`; `me/locked` cannot be pushed to. Everything is in memory, except for files
that come by Xet: the client stores them in a folder by itself, and tells only their SHA-256.
"""

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

LARGE = (".safetensors", ".png")  # by LFS, as the hub's .gitattributes say; others are part of the commit


class Hub(ThreadingHTTPServer):
    """The server, which a `with` starts and ends.

    Attributes:
        repositories: {"me/name": {path: content}}.
        private: ids of private repositories.
        faults: [(pattern of "METHOD /path", what happens once: a status, or "cut": the line is dropped half way)].
        requests: "METHOD /path" of each request.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, xet_folder: str = ""):
        super().__init__(("127.0.0.1", port), Handler)
        self.xet_folder = xet_folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {"me/locked": {}}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.faults: list[tuple] = []
        self.requests: list[str] = []
        self.messages: list[str] = []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that has gone is no error here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for 40 ms

    def handle_request(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        asked = f"{self.command} {path}"
        self.server.requests.append(asked)
        fault = next((f for f in self.server.faults if re.search(f[0], asked)), None)
        if fault:
            self.server.faults.remove(fault)
            if fault[1] == "cut":
                self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
                self.close_connection = True
                return
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault:
            self.answer(fault[1], {"error": "as told"})
            return
        for pattern, function in ROUTES:
            if found := re.fullmatch(pattern, asked):
                if "Authorization" in function.__doc__ and self.headers.get("Authorization") != "Bearer good":
                    self.answer(401, {"error": "Invalid username or password."})
                    return
                function(self, *found.groups())
                return
        self.answer(404, {"error": f"{asked}: not in this stand-in"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, status: int, content: dict | list | bytes = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, *_):
        pass

    # ---- what is asked -----------------------------------------------------------------------------------------------

    def whoami(self):
        """Authorization."""
        self.answer(200, {"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self):
        """Authorization."""
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
        elif not name.startswith("me/"):
            self.answer(403, {"error": f"You don't have the rights to create a model under {name.split('/')[0]}"})
        else:
            self.server.repositories[name] = {".gitattributes": b""}
            if asked.get("visibility") == "private":
                self.server.private.add(name)
            self.answer(200, {"url": f"{self.server.url}/{name}"})

    def auth_check(self, name):
        """Authorization."""
        locked = name == "me/locked"
        self.answer(403 if locked else 200, {"error": "Forbidden"} if locked else b"OK")

    def info(self, name, *_):
        """Of a repository."""
        if name not in self.server.repositories:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in self.server.repositories[name]]
        private = name in self.server.private
        self.answer(200, {"id": name, "sha": "0" * 40, "private": private, "tags": [], "siblings": siblings})

    def tree(self, name, _):
        """Of the files of a repository."""
        files = self.server.repositories[name].items()
        self.answer(200, [{"type": "file", "path": path, "size": len(x), "oid": git_oid(x)} for path, x in files])

    def validate_card(self):
        """Check the YAML of a card; the hub knows more errors."""
        text = json.loads(self.body)["content"]
        try:
            yaml.safe_load(text.split("---\n")[1])
        except (IndexError, yaml.YAMLError) as error:
            self.answer(400, {"errors": [{"message": str(error)}], "warnings": []})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, name):
        """Authorization."""
        files, there = json.loads(self.body)["files"], self.server.repositories[name]
        mode = lambda path: "lfs" if path.endswith(LARGE) else "regular"
        oid = lambda path: {"oid": git_oid(there[path])} if path in there and mode(path) == "regular" else {}
        about = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files]
        self.answer(200, {"files": [{**file, **oid(file["path"])} for file in about]})

    def batch(self, _):
        """Authorization."""
        objects = json.loads(self.body)["objects"]
        action = lambda oid: {} if oid in self.server.large else {"actions": {"upload": {"href": self.upload_url(oid)}}}
        self.answer(200, {"transfer": "basic", "objects": [{**x, **action(x["oid"])} for x in objects]})

    def xet_token(self, _):
        """Authorization."""
        address = f"local://{self.server.xet_folder}"
        self.answer(200, {"casUrl": address, "accessToken": "token", "exp": 4_000_000_000})

    def upload_url(self, oid: str) -> str:
        return f"{self.server.url}/large/{oid}"

    def upload(self, oid):
        """Put a large file, whose address is the permission."""
        right = hashlib.sha256(self.body).hexdigest() == oid
        if right:
            self.server.large[oid] = self.body
        self.answer(200 if right else 400)

    def commit(self, name):
        """Authorization."""
        files = dict(self.server.repositories[name])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large.get(value["oid"], value["oid"].encode())
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.server.repositories[name] = files
        self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.url}/{name}/commit/1"})

    def resolve(self, name, path):
        """Get a file."""
        content = self.server.repositories.get(name, {}).get(path)
        if content is None:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit="0" * 40)
        else:
            oid = hashlib.sha256(content).hexdigest()
            self.answer(200, content, ETag=f'"{oid}"', X_Repo_Commit="0" * 40, X_Linked_Size=len(content))


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("GET /api/whoami-v2", Handler.whoami),
    ("POST /api/repos/create", Handler.create),
    (f"GET /api/models/{NAME}/auth-check/write", Handler.auth_check),
    (f"GET /api/models/{NAME}(/revision/.*)?", Handler.info),
    (f"GET /api/models/{NAME}/tree/[^/]+(/.*)?", Handler.tree),
    ("POST /api/validate-yaml", Handler.validate_card),
    (f"POST /api/models/{NAME}/preupload/main", Handler.preupload),
    (f"POST /{NAME}.git/info/lfs/objects/batch", Handler.batch),
    (f"GET /api/models/{NAME}/xet-write-token/main", Handler.xet_token),
    (r"PUT /large/(\w+)", Handler.upload),
    (f"POST /api/models/{NAME}/commit/main", Handler.commit),
    (f"(?:GET|HEAD) /{NAME}/resolve/[^/]+/(.+)", Handler.resolve),
]

if __name__ == "__main__":
    hub = Hub(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
    print(f"HF_ENDPOINT={hub.url} HF_TOKEN=good HF_HUB_DISABLE_XET=1", flush=True)
    hub.serve_forever()
