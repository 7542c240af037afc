"""The server of `winnow watch`: whom it answers, what it says, and that it says it anew when a run goes on."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.study import watch
from winnow.study.watch import Watch

from ..builders.pages import make_run
from ..builders.watch import serving


def ask(server: Watch, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path if "?" in path else f"{path}?token=geheim", skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=20)


def test_page_and_data(run: Path) -> None:
    with serving(run) as server:
        page, html = ask(server, "/")
        assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        assert "connect-src 'self'" in str(page.getheader("Content-Security-Policy"))
        assert b"pass@1" in html
        answer, body = ask(server, "/data.json")
        data = json.loads(body)
        assert data["runs"][0]["metrics"]["step"][-1] == 20
        mark = str(answer.getheader("ETag"))
        assert f'"live":"{mark}"'.encode() in html
        assert ask(server, "/data.json", If_None_Match=mark)[0].status == 304
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 21, "reward": 0.5, "num_tokens": 10**6, "seconds_total": 99.0}) + "\n")
        answer, body = ask(server, "/data.json", If_None_Match=mark)
        assert answer.status == 200
        assert json.loads(body)["runs"][0]["metrics"]["step"][-1] == 21


def test_a_page_that_takes_long_is_read_a_tenth_of_the_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run changes in every second, and a page asks every two."""
    read: list[float] = []
    monkeypatch.setattr(watch, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(watch, "report_data", lambda runs: {"read": read.append(time.monotonic())})
    with Watch([run]) as server:
        monkeypatch.setattr(watch, "report_data", lambda runs: (time.sleep(0.05), {"read": read.append(0.0)})[1])
        server._rest_until = 0.0
        for size in range(5):
            (run / "metrics.jsonl").write_text("x" * size)
            server.document()
        assert len(read) == 2, "once at the start, and once of the five"
        server._rest_until = 0.0
        assert server.document()[0] == watch.mark_of([run])
    assert len(read) == 3


def test_a_file_that_is_removed_at_that_moment_is_absent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SQLite removes the write-ahead log of a ledger when its run ends."""
    before = watch.mark_of([run])
    with monkeypatch.context() as moment:
        moment.setattr(Path, "exists", lambda path: True)  # what was true a moment ago
        assert watch.mark_of([run]) == before
    with pytest.raises(ValueError, match="not a run directory"):
        Watch([run / "metrics.jsonl"])


def test_who_is_answered(run: Path) -> None:
    with serving(run) as server:
        assert ask(server, "/../../etc/passwd")[0].status == 404
        assert ask(server, "/data.json", method="POST")[0].status == 501
        answer, body = ask(server, "/", method="HEAD")
        assert (answer.status, body) == (200, b"")
        assert server.url.endswith("/?token=geheim")
        for path in ("/?", "/data.json?", "/?x=geheim"):
            answer, body = ask(server, path, Host="evil.example")
            assert answer.status == 403
            assert b"lacks ?token=" in body
        assert ask(server, "/?token=geheix")[0].status == 403
        assert ask(server, "/?token=gehe%C3%AFm")[0].status == 403
        assert ask(server, "/?token=geheim", Host="laptop.lan:99")[0].status == 200


def test_a_run_that_goes_away_is_said(run: Path) -> None:
    with serving(run) as server:
        for file in run.iterdir():
            file.unlink()
        answer, body = ask(server, "/data.json")
        assert answer.status == 503
        assert b"not a run directory" in body


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "192.0.2.1", "token": "t"}, "cannot listen on 192.0.2.1"),
        ({"port": 70000}, "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Watch([run], **options)


def test_a_port_that_is_taken(run: Path) -> None:
    with serving(run) as server, pytest.raises(ConfigError, match="--port 0 takes a free one"):
        Watch([run], port=server.server_address[1])


def test_the_command_says_where(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Watch, poll_interval: float = 0.5) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "serve_forever", interrupted)
    found = CliRunner().invoke(app, ["watch", str(run), "--port", "0", "--json"])
    assert found.exit_code == 0, found.output
    urls = [json.loads(found.stdout)["url"]]
    assert urls[0].startswith("http://127.0.0.1:")
    urls.append(Watch([run]).url)
    assert len({url.partition("?token=")[2] for url in urls} - {""}) == 2, "each has a secret of its own"


@pytest.mark.parametrize("sent", [b"GET http://[ HTTP/1.0\r\n\r\n", b"\x16\x03\x01 TLS\r\n\r\n", b"GET / HT"])
def test_what_strangers_send_is_not_told_on_the_console(run: Path, capfd: Any, sent: bytes) -> None:
    with serving(run) as server:
        with socket.create_connection(server.server_address[:2], timeout=20) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        assert ask(server, "/data.json")[0].status == 200
    assert "Traceback" not in capfd.readouterr().err
