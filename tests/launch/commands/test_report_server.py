"""`tdpp report --serve`: a real server, asked over a real connection."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from conf.run_folder.rundir import RunDir
from launch import cli
from launch.commands.serving import library
from launch.commands.serving.library import Kept, Library
from launch.commands.serving.server import is_here, reply
from tests.support.launch.live import ENVIRONMENT, TDPP
from tests.support.reports.synthetic import Shape, make_run

SHAPE = Shape(pipeline=2, data=1, micro_batches=2, iterations=4)
FIRST, SECOND = "tiny/20260101-000000-aaaa", "odd name&/20260102-000000-bbbb"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "runs"
    for name in (FIRST, SECOND):
        make_run(folder / name, SHAPE)
    (folder / "tiny/no-run").mkdir()
    (folder / "secret.txt").write_text("nobody's page")
    return folder


@dataclass
class Served:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: str

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
        """`path` behind the secret part, or, with two slashes, a whole one."""
        where = urlsplit(self.address)
        connection = http.client.HTTPConnection(str(where.hostname), int(where.port or 0), timeout=120)
        try:
            connection.request(method, path[1:] if path.startswith("//") else where.path + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()


@contextmanager
def serving(runs: Path, *words: str, stderr: int = subprocess.DEVNULL) -> Iterator[Served]:
    process = subprocess.Popen(
        [*TDPP, "report", "--serve", "--port", "0", "--runs-dir", str(runs), *words],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Served(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as found:
        yield found


def test_the_list_leads_to_each_run_and_to_their_comparison(served: Served) -> None:
    status, overview, headers = served.ask("")
    assert status == HTTPStatus.OK
    links = re.findall(r'href="(runs/[^"]*)"', overview)
    assert links == [f"runs/{quote(name)}/" for name in (SECOND, FIRST)], "the latest first"
    assert headers["Cache-Control"] == "no-store"
    for link, name in zip(links, ("odd name&amp;", "tiny"), strict=True):
        status, page, _ = served.ask(link)
        assert status == HTTPStatus.OK
        assert f"<h1>{name}/" in page
        assert served.ask(link + "timeline.html")[0] == HTTPStatus.OK
        assert served.ask(link.rstrip("/"))[2]["Location"].endswith(f"/{link}")
    chosen = "&".join(f"run={quote(name, safe='')}" for name in (FIRST, SECOND))
    status, page, _ = served.ask(f"compare?{chosen}")
    assert status == HTTPStatus.OK
    assert "2 runs compared" in page
    assert re.search(r">[^<]+ busy<", page), "as in a comparison that is written"
    assert set(links) <= set(re.findall(r'href="([^"]*)"', page))


@pytest.mark.parametrize(
    "path",
    [
        *("runs/tiny/no-run/", "runs/../secret.txt", "runs/tiny/../../secret.txt", "secret.txt", "runs/%2e%2e/runs/"),
        *(
            f"runs/{FIRST}/config.yaml",
            f"runs/{FIRST}/../20260101-000000-aaaa/",
            "runs/tiny%2F..%2Ftiny/x/",
            "%00",
            "a",
        ),
        *("runs//etc/passwd", f"//runs/{FIRST}/", "//", "//wrong-token/", "///etc/passwd"),
    ],
)
def test_nothing_but_pages_of_runs_is_there(served: Served, path: str) -> None:
    status, page, _ = served.ask(path)
    assert status == HTTPStatus.NOT_FOUND
    assert "nobody's page" not in page


@pytest.mark.parametrize("target", ["http://[x", "//[::1", "{path}compare?" + "run=a&" * 200, "http://[x]:y/"])
def test_what_is_no_address_is_refused_without_a_word_on_the_terminal(runs: Path, target: str) -> None:
    with serving(runs, stderr=subprocess.PIPE) as found:
        where = urlsplit(found.address)
        with socket.create_connection((where.hostname, where.port), timeout=120) as connection:
            request = f"GET {target.format(path=where.path)} HTTP/1.0\r\nHost: localhost\r\n\r\n"
            connection.sendall(request.encode())
            answer = connection.makefile("rb").read()
        assert answer.split(b" ")[1] in (b"400", b"404")
        assert found.ask("")[0] == HTTPStatus.OK
        found.process.kill()
        assert len(found.process.communicate()[1].splitlines()) == 1, "how to open it"


def test_it_only_shows(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, _, headers = served.ask("", method)
        assert (status, headers["Allow"]) == (HTTPStatus.METHOD_NOT_ALLOWED, "GET, HEAD")
    status, body, headers = served.ask(f"runs/{FIRST}/", "HEAD")
    assert (status, body) == (HTTPStatus.OK, "")
    assert int(headers["Content-Length"]) > 1000


def test_a_foreign_name_that_leads_here_is_refused(served: Served) -> None:
    assert served.ask("", Host="evil.example:8000")[0] == HTTPStatus.FORBIDDEN
    assert served.ask("", Host="localhost:9999")[0] == HTTPStatus.OK
    found = {host: is_here(host) for host in ("localhost", "[::1]:80", "127.0.0.1:1", "LOCALHOST:80")}
    assert all(found.values()), found
    found = {host: is_here(host) for host in (None, "", "a.localhost", "127.0.0.1.example:80", "localhost:x", "::1")}
    assert not any(found.values()), found


@pytest.mark.slow
def test_only_this_machine_reaches_it_and_ctrl_c_ends_it_well(runs: Path) -> None:
    with serving(runs, "tiny") as served:
        assert re.findall(r'name="run" value="([^"]*)"', served.ask("")[1]) == [FIRST], "only what was asked for"
        assert served.ask(f"runs/{quote(SECOND)}/")[0] == HTTPStatus.NOT_FOUND
        port = int(urlsplit(served.address).port or 0)
        listening = Path("/proc/net/tcp").read_text().splitlines()
        assert any(line.split()[1] == f"0100007F:{port:04X}" for line in listening)
        assert cli.main(["report", "--serve", "--port", str(port), "--runs-dir", str(runs)]) == 1
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=120) == 0


def test_a_damaged_run_says_why_and_a_deleted_one_is_gone(tmp_path: Path) -> None:
    for name in ("tiny/20260101-000000-aaaa", "tiny/20260102-000000-bbbb"):
        make_run(tmp_path / "runs" / name, SHAPE)
    library = Library(tmp_path / "runs")
    damaged, gone = RunDir.all(tmp_path / "runs")
    damaged.plan.write_text("{}")
    shutil.rmtree(gone.path)
    found = reply(library, "t", "localhost", f"/t/runs/{damaged.name}/")
    assert found.status is HTTPStatus.INTERNAL_SERVER_ERROR
    assert "plan.json is damaged" in found.body
    assert reply(library, "t", "localhost", f"/t/runs/{gone.name}/").status is HTTPStatus.NOT_FOUND


def test_a_page_is_made_again_when_its_run_has_changed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [1000.0], list[RunDir]()
    monkeypatch.setattr(library.time, "monotonic", lambda: now[0])
    pages = Kept[int](lambda run: made.append(run) or len(made), lambda page: page > 3, most=1)
    run, other = list(RunDir.all(runs))

    def after(seconds: float) -> int:
        now[0] += seconds
        return pages.of(run)[0]

    assert [after(0), after(library.FRESH_S + 1)] == [1, 1], "nothing has changed"
    os.utime(run.metrics, (now[0], now[0]))
    assert [after(0), after(1)] == [2, 2]
    os.utime(run.metrics, (0, 0))
    assert [after(1), after(library.FRESH_S)] == [2, 3], "not too often"
    assert after(library.LOOK_S + 1) == 4, "its job may be gone"
    assert after(library.LOOK_S + 1) == 4, "it is over"
    assert pages.of(other)[0] == 5
    assert after(0) == 6, "only one is kept"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--serve", "--watch"], "--watch does not work with --serve"),
        (["--serve", "--tensor", "2"], "--tensor does not work with --serve"),
        (["--port", "1"], "--port 1 works only with --serve: add --serve"),
        (["--serve", "nothing-like-this"], "no run 'nothing-like-this'"),
    ],
)
def test_what_does_not_go_with_a_server_is_refused(
    runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--runs-dir", str(runs), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_opens_in_a_browser_or_says_where_it_is(runs: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    command = [*TDPP, "report", FIRST, "--runs-dir", str(runs), "--output", str(tmp_path / "out"), "--open"]
    alone = {name: value for name, value in ENVIRONMENT.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    subprocess.run(command, env=alone | {"BROWSER": str(browser)}, capture_output=True, check=True)
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "out/index.html").as_uri()
    done = subprocess.run(
        [sys.executable, "-c", "from launch.commands import report; report.show(report.Path('a.html'))"],
        cwd=tmp_path, env=alone | {"BROWSER": "", "PATH": "/nonexistent"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == f"no browser found here; open {tmp_path / 'a.html'} yourself\n"
