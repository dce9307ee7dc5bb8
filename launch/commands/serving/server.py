"""The server: which request gets which page, and who may ask.

It only reads. A request names a run, never a file, and a name leads to a run only if the list of runs has it. Whoever
asks must know the address's secret part, since a port of this machine is open to all of its users, and must ask
for this machine by name, since a page of any site could otherwise be told that its own name means this machine.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from conf.errors import TdppError, reworded
from launch.commands.serving.library import Library
from launch.errors import LaunchError
from reports.figures.page import page

HOST = "127.0.0.1"
PORT = 8000
NAMES = ("localhost", "127.0.0.1", "[::1]")
MOST_COMPARED = 100
"""Runs in one comparison."""
SILENT_S = 30.0
"""Who sends no request for so long is not waited for."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: HTTPStatus
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def reply(library: Library, token: str, host: str | None, target: str) -> Reply:
    """What a GET of `target` gets, such as `/<token>/runs/tiny/20260131-120000-0123abcd/`. `host` is its header."""
    if not is_here(host):
        return _message_page(
            HTTPStatus.FORBIDDEN,
            f"{host or 'no name'} does not name this machine; open http://{HOST}, or forward a port of your own",
        )
    try:
        split = urlsplit(target)
    except ValueError:  # such as http://[x
        return _message_page(HTTPStatus.BAD_REQUEST, "This is not an address.")
    given, *parts = split.path.removeprefix("/").split("/")
    if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        return _message_page(HTTPStatus.NOT_FOUND, "Open the complete address that 'tdpp report --serve' printed.")
    try:
        return _found(library, token, [unquote(part) for part in parts], split.query)
    except (TdppError, OSError) as error:
        return _message_page(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def is_here(host: str | None) -> bool:
    """Whether a Host header names this machine, with any port: ssh may forward another one."""
    name, colon, port = (host or "").rpartition(":")
    return (name if colon and port.isdecimal() else host or "").lower() in NAMES


def _found(library: Library, token: str, parts: list[str], query: str) -> Reply:
    match parts:
        case []:
            return _moved(f"/{token}/")
        case [""]:
            return Reply(status=HTTPStatus.OK, body=library.overview())
        case ["compare"]:
            return _compared(library, token, query)
        case ["runs", name, stamp, *rest] if (run := library.named(f"{name}/{stamp}")) is not None:
            match rest:
                case []:
                    return _moved(f"/{token}/runs/{quote(run.name)}/")
                case [""] | ["index.html"]:
                    return Reply(status=HTTPStatus.OK, body=library.index(run))
                case ["now"]:
                    known = parse_qs(query).get("have", [""])[0].split(",")
                    json_type = {"Content-Type": "application/json; charset=utf-8"}
                    return Reply(status=HTTPStatus.OK, body=library.now(run, known), headers=json_type)
                case ["timeline.html"]:
                    return Reply(status=HTTPStatus.OK, body=library.timeline(run))
    return _message_page(HTTPStatus.NOT_FOUND, "No such page. The run may have been deleted.")


def _compared(library: Library, token: str, query: str) -> Reply:
    try:
        names = parse_qs(query, max_num_fields=MOST_COMPARED).get("run", [])
    except ValueError:
        return _message_page(HTTPStatus.BAD_REQUEST, f"A comparison has at most {MOST_COMPARED} runs.")
    runs = [run for name in dict.fromkeys(names) if (run := library.named(name)) is not None]
    if not runs:
        return _moved(f"/{token}/")
    return Reply(status=HTTPStatus.OK, body=library.comparison(runs))


def _moved(where: str) -> Reply:
    return Reply(status=HTTPStatus.MOVED_PERMANENTLY, headers={"Location": where})


def _message_page(status: HTTPStatus, message: str) -> Reply:
    body = f"<header><h1>{status.phrase}</h1></header><main><section><p>{escape(message)}</p></section></main>"
    return Reply(status=status, body=page(f"{status.phrase} – tdpp", body))


class Server(ThreadingHTTPServer):
    """Serves on a port of this machine that only this machine reaches; 0 is a free one.

    Raises:
        LaunchError: the port cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, library: Library, port: int) -> None:
        self.library = library
        self.token = secrets.token_urlsafe(24)
        with reworded(
            LaunchError, f"--port {port}: not available (", "); give another port, or --port 0 for a free one"
        ):
            super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "tdpp", ""
    timeout = SILENT_S

    def do_GET(self) -> None:
        self._send(self._reply(), with_body=True)

    def do_HEAD(self) -> None:
        self._send(self._reply(), with_body=False)

    def _refuse(self) -> None:
        refusal = _message_page(HTTPStatus.METHOD_NOT_ALLOWED, "This server only shows pages; it accepts GET and HEAD.")
        self._send(Reply(status=refusal.status, body=refusal.body, headers={"Allow": "GET, HEAD"}), with_body=True)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _reply(self) -> Reply:
        return reply(self.server.library, self.server.token, self.headers.get("Host"), self.path)

    def _send(self, answer: Reply, *, with_body: bool) -> None:
        body = answer.body.encode("utf-8", errors="replace")
        try:
            self.send_response(answer.status)
            for name, value in {**HEADERS, **answer.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the browser has gone on to another page
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: an address holds the secret."""
