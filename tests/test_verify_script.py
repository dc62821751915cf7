"""scripts/verify_numerics.py on a tiny model: what it exits with and what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemma4_flex.attention import PagedBackend
from gemma4_flex.geometry import ModelGeometry
from tests.tiny import tiny_model

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "verify_numerics.py"
spec = importlib.util.spec_from_file_location("verify_numerics", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs main() with random weights in the place of a named checkpoint; (exit code, stdout, stderr)."""

    def load(name, *, dtype, device, seed):
        assert name == "some/model" and device == "cpu"
        model = tiny_model(seed, dtype=dtype)
        return SimpleNamespace(model=model, tokenizer=None, geometry=ModelGeometry.from_config(model.config))
    monkeypatch.setattr(script, "load_text_model", load)

    def run(*argv: str):
        code = script.main(["--device", "cpu", "--attention", "sdpa", "--no-compile", "--max_new_tokens", "4",
                            "--out", str(tmp_path), *argv])
        said = capsys.readouterr()
        return code, said.out, said.err
    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_exits_0_and_leaves_both_files(run, tmp_path, dtype):
    code, out, err = run("--model_name", "some/model", "--dtype", dtype)
    assert (code, err) == (0, "")
    for suffix in ("json", "png"):
        path = tmp_path / f"verify_model_{dtype}_sdpa_paged.{suffix}"
        assert path.exists() and str(path) in out


@pytest.mark.parametrize("dtype, contract", [("float32", "logits equal HF's"), ("bfloat16", "logits error within 1.1 of HF's")])
def test_a_broken_contract_exits_1_and_is_named(run, monkeypatch, tmp_path, dtype, contract):
    honest = PagedBackend.attend
    monkeypatch.setattr(PagedBackend, "attend", lambda *args: honest(*args[:-1], 16**-0.5))
    code, out, err = run("--model_name", "some/model", "--dtype", dtype)
    assert code == 1 and f"contract broken: {contract}: " in err
    assert f"BROKEN: {contract}" in out and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("argv, says", [
    (["--max_new_tokens", "0"], "max_new_tokens"),
    (["--attention", "eager"], "attention"),
    (["--device", "tpu"], "device"),
    (["--out", "/proc/nowhere"], "/proc/nowhere"),
])
def test_what_cannot_be_run_gets_one_sentence(run, tmp_path, argv, says):
    code, out, err = run("--model_name", "some/model", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_gets_one_sentence(capsys, tmp_path):
    code = script.main(["--model_name", "no such model", "--device", "cpu", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_text_of_the_bundled_prompts_is_used_where_there_is_a_tokenizer():
    class Tokenizer:
        bos_token, chat_template = "<bos>", "own"

        def apply_chat_template(self, messages, **kwargs):
            return messages[-1]["content"]

        def __call__(self, text, **kwargs):
            return {"input_ids": [len(text)] * 3}

    ids = script.text_of(SimpleNamespace(tokenizer=Tokenizer()))
    assert len(ids) >= 3 * 64 and torch.tensor(ids).min() > 0
    assert script.text_of(SimpleNamespace(tokenizer=None)) == []
