"""Local S3 server, and a proxy that delays responses, returns errors and closes connections."""

import contextlib
import functools
import http.client
import itertools
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import boto3
from moto.server import ThreadedMotoServer

from support.project import free_port

KEYS = {
    "AWS_ACCESS_KEY_ID": "key-of-a-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Store:
    """A bucket and the environment variables to access it with s3fs."""

    def __init__(self, address: str):
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": address}
        names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
        self.client = boto3.client("s3", endpoint_url=address, **dict(zip(names, KEYS.values(), strict=True)))
        self.client.create_bucket(Bucket="mine")

    def names(self, folder: str) -> set[str]:
        """Returns the names of all objects in a folder, relative to it."""
        found = self.client.list_objects_v2(Bucket="mine", Prefix=f"{folder}/").get("Contents", [])
        return {about["Key"].removeprefix(f"{folder}/") for about in found}

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket="mine", Key=name)["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket="mine", Key=name, Body=content)

    def upload(self, local: Path, folder: str) -> None:
        """Uploads a local folder recursively."""
        for path in local.rglob("*"):
            if path.is_file():
                self.write(f"{folder}/{path.relative_to(local)}", path.read_bytes())


@contextlib.contextmanager
def store_server() -> Iterator[Store]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = Store(f"http://{host}:{port}")
    store.vanish = functools.cache(server.stop)  # new connections then hang
    yield store
    store.vanish()


@contextlib.contextmanager
def faulty(
    store: Store, latency: float = 0.02, fail_every: int = 100, cut_every: int = 150
) -> Iterator[dict[str, str]]:
    """Yields environment variables to access the store with s3fs through a proxy.

    Args:
        store: the store behind the proxy.
        latency: seconds before each response.
        fail_every: every n-th request fails with status 503.
        cut_every: every n-th response is truncated.
    """
    behind = store.environment["AWS_ENDPOINT_URL"].removeprefix("http://")
    numbers = itertools.count(1)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def forward(self):
            number = next(numbers)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(latency)
            if number % fail_every == 0:
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection(behind, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if number % cut_every == 0:
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Proxy)
    Thread(target=server.serve_forever, daemon=True).start()
    yield {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


class Gateway:
    """Proxy process for a store, which kills itself with SIGKILL in the middle of an upload.

    `start` starts a new process at the same address.

    Args:
        store: the store behind the proxy.
        dies_at: part of the name of the object whose upload is interrupted.
    """

    def __init__(self, store: Store, dies_at: str):
        self._behind = store.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]
        self._port = str(free_port())
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}"}
        self.start(dies_at)

    def start(self, *dies_at: str) -> None:
        command = [sys.executable, Path(__file__).with_name("gateway.py"), self._port, self._behind, *dies_at]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"listening\n"

    def is_dead(self) -> bool:
        return self._process.poll() == -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
