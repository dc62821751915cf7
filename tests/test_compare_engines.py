"""scripts/benchmarks/compare_engines.py: what it refuses, and a whole comparison on the bundled model at small scale."""
from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from gemma4_flex.bench import rivals, roofline
from tests.bench.rival_stubs import World

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("compare_engines", ROOT / "scripts" / "benchmarks" / "compare_engines.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

SMALL = ["--batches", "1,3", "--prompt_tokens", "4", "--new_tokens", "3", "--prefill_prompts", "2", "--prefill_tokens", "40",
         "--mixed_requests", "2", "--mixed_batch", "2", "--flex_config", '{"attention": "sdpa", "compile": false}']


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: roofline.Bandwidth(1e9, 1 << 20, 3))
    monkeypatch.setattr(roofline, "matmul_rate", lambda device, dtype: roofline.MatmulRate(1e11, dtype, (1024,), 3))


def refused(capsys, *argv: str) -> str:
    """The one line that main() says on stderr before it gives up with exit code 2, having said nothing else."""
    try:
        code = script.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(("argv", "says"), [
    (["--engines", "flex,vlm"], "there is no engine 'vlm': choose from flex, flex_eager, transformers, transformers_static"),
    (["--engines", ","], "at least one name"),
    (["--jobs", "decode,chat"], "there is no job 'chat'"),
    (["--jobs", ""], "at least one name"),
    (["--batches", "1,two"], "no list of whole numbers"),
    (["--batches", "0"], "--batches"),
    (["--new_tokens", "0"], "--new_tokens must be at least 1"),
    (["--rounds", "0"], "--rounds must be at least 1"),
    (["--warmup", "0"], "--warmup must be at least 1"),
    (["--threads", "0"], "--threads must be at least 1"),
    (["--gguf", "absent.gguf"], "absent.gguf is no file"),
    (["--flex_config", "{attention}"], "is not JSON"),
    (["--flex_config", "[1]"], "is no JSON object"),
    (["--flex_config", '{"max_batch_size": 2}'], "'max_batch_size' cannot be set there"),
    (["--flex_config", '{"attention": "eager"}'], "'sdpa'"),
    (["--dtype", "float16"], "bfloat16"),
    (["--device", "tpu"], "'cuda'"),
    (["--stats_path", "absent/r.json"], "can't write"),
    (["--model_name", "tinny", "--stats_path", "HERE"], "'tinny'"),
    (["--model_name", "tiny", "--batches", "1000", "--stats_path", "HERE"], "can't draw 1000 prompts"),
    (["--engine", "flex"], "unrecognized arguments"),
])
def test_bad_flags_get_one_sentence_and_leave_no_file(capsys, tmp_path, argv, says):
    assert says in refused(capsys, *[str(tmp_path / "r.json") if flag == "HERE" else flag for flag in argv])
    assert not list(tmp_path.iterdir())


def test_every_job_is_done_by_real_engines_with_the_same_tokens(capsys, tmp_path):
    path = tmp_path / "r.json"
    code = script.main([*SMALL, "--engines", "flex_eager,transformers,generate_batch,llama_cpp", "--rounds", "1",
                        "--stats_path", str(path)])
    said, result = capsys.readouterr().out, json.loads(path.read_text())
    assert code == 0 and f"result: {path}, picture: {tmp_path / 'r.png'}" in said and (tmp_path / "r.png").is_file()
    assert [(job["kind"], job["batch"]) for job in result["jobs"]] == [
        ("decode", 1), ("decode", 3), ("mixed", 2), ("prefill", 2)]
    for job in result["jobs"]:
        ours, theirs, continuous, missing = job["engines"]
        assert ours["status"] == theirs["status"] == "ran"
        assert ours["agreement"]["same"] == ours["agreement"]["requests"] == job["requests"]
        assert all(math.isfinite(e["floor_fraction"]) for e in (ours, theirs))
        assert missing["status"] == "absent" and "llama_cpp: absent" in said
        # 5.24's continuous batching does not run the architecture; one that does has to give what was asked
        assert continuous["status"] in ("does not run", "ran") and (continuous["status"] == "ran" or continuous["reason"])
    assert result["threads"] == 1 and result["config"]["seed"] == 0 and result["config"]["new_tokens"] == 3


def test_a_failure_of_ours_is_exit_code_1_and_everything_else_is_still_written(tmp_path, monkeypatch, capsys):
    def broken(self):
        raise RuntimeError("no such kernel")

    world = World()
    monkeypatch.setattr(rivals, "ENGINES", {"flex": world.rival("flex", 1.0, run=broken), "b": world.rival("b", 1.0)})
    flags = [*SMALL, "--jobs", "prefill", "--rounds", "1", "--stats_path", str(tmp_path / "r.json")]
    assert script.main(flags) == 1
    said = capsys.readouterr().out
    assert "flex: does not run: RuntimeError: no such kernel" in said and "picture" not in said
    assert json.loads((tmp_path / "r.json").read_text())["jobs"][0]["engines"][1]["status"] == "ran"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]      # no decode, no picture
    assert script.main([*flags, "--engines", "b"]) == 0
