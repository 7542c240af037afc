"""Uploads through huggingface_hub to a hub on this machine that keeps what comes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from typer.testing import CliRunner

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.config import validate
from winnow.record.ledger import Ledger
from winnow.run.hub import push

from .. import parity

TOKEN = "hf_" + "s3cr3t" * 5
REWARD = f"{parity.__file__}:parity_reward"


class Hub(ThreadingHTTPServer):
    """As much of a hub's protocol as an upload needs, git LFS for weights included."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.broken = False


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None: ...

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_GET(self) -> None:
        if "/tree/" in self.path or "/revision/" in self.path:
            listed = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.server.files]
            siblings = {"id": "tester/x", "siblings": [{"rfilename": name} for name in self.server.files]}
            self.answer(listed if "/tree/" in self.path else siblings)
        else:
            self.answer({"error": self.path}, 404)

    def do_POST(self) -> None:
        hub, data = self.server, self.body()
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.broken:
            self.answer({"error": "the hub is being repaired"}, 403)
        elif self.path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
            hub.repos[name] = asked
            self.answer({"url": f"{hub.url}/{name}", "id": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            kinds = {True: "lfs", False: "regular"}
            files = [f["path"] for f in json.loads(data)["files"]]
            modes = [{"path": f, "uploadMode": kinds[f.endswith("safetensors")], "shouldIgnore": False} for f in files]
            self.answer({"files": modes})
        elif self.path.endswith("/objects/batch"):
            objects = json.loads(data)["objects"]
            upload = [o | {"actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}} for o in objects]
            self.answer({"transfer": "basic", "objects": upload})
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in data.splitlines()])
        else:
            self.answer({"error": self.path}, 404)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub, names = self.server, []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del hub.files[value["path"]]
            names += [value["path"]] if "path" in value else []
        hub.commits.append({"message": lines[0]["value"]["summary"], "files": names})
        oid, repo = f"{len(hub.commits):040x}", "/".join(self.path.split("/")[3:5])
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{repo}/commit/{oid}"})


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def winnow(hub: Hub, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: huggingface_hub reads its environment once."""
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "COLUMNS": "500"}
    env |= {"HF_TOKEN_PATH": os.devnull, "HF_TOKEN": TOKEN}
    return subprocess.run(
        [sys.executable, "-m", "winnow.cli.main", *words], env=env, capture_output=True, text=True, check=False
    )


def config_file(tmp_path: Path, settings: dict[str, Any]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.mark.slow
def test_every_save_and_the_end_are_uploaded(hub: Hub, tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """Under LoRA the saves are adapters, the end a whole model, in whose place no adapters are left."""
    run = Path(str(tiny_config["output_dir"]))
    settings = tiny_config | {"max_steps": 2, "reward_funcs": [REWARD], "lora": {"r": 2}, "eval_steps": None}
    pushing = {"push_to_hub": True, "hub_model_id": "team/tiny", "hub_strategy": "every_save", "hub_private_repo": True}
    done = winnow(hub, "train", config_file(tmp_path, settings | pushing), "--json")
    assert done.returncode == 0, done.stderr
    assert list(hub.repos) == ["team/tiny"]
    asked = hub.repos["team/tiny"]
    assert asked.get("private") or asked["visibility"] == "private"
    assert [c["message"] for c in hub.commits] == [
        *("Step 1, by Winnow", "Step 2, by Winnow"),
        "Upload of a finished run by Winnow",
    ]
    assert "adapter_model.safetensors" in hub.commits[0]["files"]
    assert {name: content for name, content in hub.files.items() if name != ".gitattributes"} == {
        str(p.relative_to(run / "model")): p.read_bytes() for p in (run / "model").rglob("*") if p.is_file()
    }
    assert hub.tokens == {f"Bearer {TOKEN}"}
    kept = [p for p in run.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert not kept
    assert TOKEN not in done.stdout + done.stderr


@pytest.fixture
def here(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub for this process."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", os.devnull)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_a_failing_upload_is_a_warning_and_can_be_tried_again(here: Hub, tiny_config: dict[str, Any]) -> None:
    run = str(tiny_config["output_dir"])
    settings = tiny_config | {"max_steps": 1, "reward_funcs": [REWARD], "eval_steps": None, "push_to_hub": True}
    here.broken = True
    with pytest.warns(UserWarning, match=f"not uploaded as run .*retry with: winnow push {run}") as warned:
        Trainer(config=settings).train()
    assert (Path(run) / "model" / "model.safetensors").is_file()
    with Ledger.open(Path(run) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        assert ledger.get_meta("finished") == "true"
    again = CliRunner().invoke(app, ["push", run])
    assert again.exit_code == 1
    assert "not uploaded as run (" in again.output
    assert "403" in again.output
    here.broken = False
    found = CliRunner().invoke(app, ["push", run, "hub_private_repo=true", "--json"])
    assert found.exit_code == 0, found.output
    other = CliRunner().invoke(app, ["push", run, "learning_rate=3"])
    assert other.exit_code == 1
    assert "learning_rate: has no effect here; push takes hub_model_id" in other.output
    url = f"{here.url}/tester/run/commit/{1:040x}"
    assert json.loads(found.stdout) == {"repo": "tester/run", "url": url, "folder": f"{run}/model"}
    assert here.files["model.safetensors"] == (Path(run) / "model" / "model.safetensors").read_bytes()
    assert TOKEN not in again.output + found.output + "".join(str(w.message) for w in warned)


def test_a_copy_in_another_type_is_made_where_types_differ_and_may_fail(
    here: Hub, tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("winnow.run.hub.recast", full)
    settings = tiny_config | {"max_steps": 1, "eval_steps": None, "push_to_hub": True, "hub_strategy": "every_save"}
    Trainer(config=settings, reward_funcs=parity.parity_reward).train()
    assert len(here.commits) == 2, "float32 as the checkpoint is: no copy"
    other = settings | {"save_dtype": "bfloat16", "output_dir": settings["output_dir"] + "-half"}
    with pytest.warns(UserWarning, match=r"not uploaded as .*no space left on device"):
        Trainer(config=other, reward_funcs=parity.parity_reward).train()
    assert len(here.commits) == 3, "the finished model has its type"


def test_what_could_not_be_uploaded_is_not_begun(
    here: Hub, tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="hub_model_id: Repo id must "):
        Trainer(config=tiny_config | {"push_to_hub": True, "hub_model_id": "a/b/c/d"})
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="push_to_hub: no token; set HF_TOKEN in the environment"):
        Trainer(config=tiny_config | {"push_to_hub": True})
    with pytest.raises(ConfigError, match="no finished model or checkpoint yet"):
        push(tmp_path, validate({"model": "m", "env": "countdown"}))
    assert not here.repos
    assert not Path(str(tiny_config["output_dir"])).exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hub_model_id": "a/b"}, "hub_model_id: a/b has no effect without push_to_hub"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy: .*'end' or 'every_save'"),
        ({"hub_token": TOKEN}, "unknown key 'hub_token'. Here set HF_TOKEN in the environment"),
    ],
)
def test_settings_without_effect_or_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        validate({"model": "m", "env": "countdown"} | settings)
    assert TOKEN not in str(found.value)
