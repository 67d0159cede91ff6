"""An agent whose program runs on another machine, 10.77.0.5: what --agent calls is `play`, and
`python far_agent.py` is the program, which plays assets/guess.

A run answers agents at a loopback address, so `play` lets the other machine reach it, as a tunnel
does.
"""

import http.server
import json
import socket
import socketserver
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

PROGRAM = ("10.77.0.5", 9000)


def copy(source: socket.socket, to: socket.socket) -> None:
    for data in iter(lambda: source.recv(1 << 16), b""):
        to.sendall(data)
    to.shutdown(socket.SHUT_WR)


class Tunnel(socketserver.ThreadingTCPServer):
    """Passes what arrives at an address of this machine on to a loopback port."""

    daemon_threads = True

    def __init__(self, host: str, port: int):
        super().__init__((host, 0), None)
        self.port = port
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request, client_address) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as loopback:
            threading.Thread(target=copy, args=(request, loopback), daemon=True).start()
            copy(loopback, request)


def play(base_url: str, prompt: str, secret: int) -> float:
    with socket.create_connection(PROGRAM) as connection:
        own = connection.getsockname()[0]
    url = urlsplit(base_url)
    with Tunnel(own, url.port) as tunnel:
        far = f"http://{own}:{tunnel.server_address[1]}{url.path}"
        body = json.dumps({"base_url": far, "prompt": prompt, "secret": secret}).encode()
        with urllib.request.urlopen("http://{}:{}".format(*PROGRAM), body) as answer:
            reward = json.load(answer)
        tunnel.shutdown()
    return reward


class Program(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(play_here(**request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "assets/guess"))
    from agent import play as play_here

    http.server.ThreadingHTTPServer(PROGRAM, Program).serve_forever()
