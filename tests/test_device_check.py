"""scripts/benchmarks/device_check.py at small scale on a CPU, and what becomes of parts that fail, hang or crash."""
from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from pathlib import Path

import pytest

from gemma4_flex.bench import device_parts, device_speed
from gemma4_flex.bench.device_bench import NANO, Bench, Settings
from gemma4_flex.bench.device_isolation import run_isolated
from gemma4_flex.bench.device_record import FILE_NAME, Record, table
from gemma4_flex.bench.roofline import MatmulRate, prefill_flops
from gemma4_flex.geometry import ModelGeometry

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks" / "device_check.py"
spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

SMALL = ("--scale", "tiny", "--device", "cpu")
NANO_GEOMETRY = ModelGeometry.from_config(json.loads(Path(NANO.removeprefix("synthetic:")).read_text()))
ALL_PARTS = [part.name for part in device_parts.PARTS]


def parts_in(folder: Path) -> dict[str, dict]:
    return {part["name"]: part for part in json.loads((folder / FILE_NAME).read_text())["parts"]}


def test_every_part_runs_at_small_scale_and_none_fails(tmp_path, capsys):
    code = script.main(["--out", str(tmp_path), *SMALL])
    said, parts = capsys.readouterr().out, parts_in(tmp_path)
    assert {name: part["detail"] for name, part in parts.items() if part["status"] != "ok"} == {} and code == 0
    assert list(parts) == ALL_PARTS and all(part["rows"] for part in parts.values())
    assert not [row for part in parts.values() for row in part["rows"] if "skipped" in row or "error" in row]
    places = {(row["batch"], row["context"]) for row in parts["decode"]["rows"]}
    assert places == {(1, 32), (2, 32), (1, 64), (2, 64)}
    for row in parts["decode"]["rows"]:
        assert 0 < row["floor_fraction"] < 1 and all(r["replayed"] >= 2 and not r["eager"] for r in row["rounds"])
    copied, computed = parts["bandwidth"]["rows"]
    for row in parts["prefill"]["rows"]:
        flops = prefill_flops(NANO_GEOMETRY, [row["length"]] * row["batch"])
        assert row["flops"] == flops and row["floor_s"] >= flops / computed["flop_per_s"] and copied["bytes_per_s"] > 0
        assert row["floor_fraction"] == row["floor_s"] / statistics.median(row["seconds"]["with"]) < 1
    assert "no part failed" in said.splitlines()[-2] and str(tmp_path / FILE_NAME) in said.splitlines()[-1]


def fake(run, name="fake", seconds=10.0):
    return device_parts.Part(name, seconds, run)


def boom(bench: Bench) -> str:
    bench.row(before_it=1)
    raise RuntimeError("planted")


def fine(bench: Bench) -> str:
    bench.row(what="model", batch=1, context=2, ms_per_step={"median": float("nan")}, tok_s=3.0)
    return "all well"


def test_a_part_that_fails_is_reported_and_the_others_still_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_parts, "PARTS", (fake(fine, "one"), fake(boom, "two"), fake(fine, "three")))
    code = script.main(["--out", str(tmp_path), *SMALL])
    parts = parts_in(tmp_path)
    assert code == 1 and [part["status"] for part in parts.values()] == ["ok", "failed", "ok"]
    assert parts["two"]["rows"] == [{"before_it": 1}] and parts["two"]["detail"] == "RuntimeError: planted"
    assert "boom" in "\n".join(parts["two"]["traceback"]) and parts["two"]["traceback"][-1] == "RuntimeError: planted"
    assert parts["one"]["rows"][0]["ms_per_step"] == {"median": "NaN"}
    assert capsys.readouterr().out.splitlines()[-2] == "FAILED: two"


def test_parts_can_be_named_and_nothing_is_begun_without_time(tmp_path, monkeypatch):
    monkeypatch.setattr(device_parts, "PARTS", (fake(fine, "one"), fake(boom, "two"), fake(fine, "three")))
    assert script.main(["--out", str(tmp_path), *SMALL, "--parts", "three", "one"]) == 0
    assert list(parts_in(tmp_path)) == ["one", "three"]
    assert script.main(["--out", str(tmp_path), *SMALL, "--minutes", "0.01"]) == 0
    assert {part["detail"] for part in parts_in(tmp_path).values()} == {"no time left"}


@pytest.mark.parametrize("argv, says", [
    (["--parts", "no such part"], "no such part"),
    (["--out", "/proc/nowhere"], "/proc/nowhere"),
])
def test_what_cannot_be_run_gets_one_sentence(tmp_path, capsys, argv, says):
    assert script.main(["--out", str(tmp_path), *SMALL, *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1 and says in said.err


def test_a_part_may_use_what_earlier_ones_left_and_half_of_what_later_ones_need():
    assert device_parts.limits(left=100, share=10, later=80) == (20, 60)
    assert device_parts.limits(left=100, share=10, later=200) == (10, 10)      # late already: its own share
    assert device_parts.limits(left=5, share=10, later=0) == (5, 5)
    assert sum(part.seconds for part in device_parts.PARTS) < 60 * device_parts.PLANNED_MINUTES - 20      # 20 s to start


# ---- a process of its own -------------------------------------------------------------------------------------------


def scripted(names, deadline, send):
    """Stands for device_parts.run_named in a child: each part does what its name says."""
    for name in names:
        send({"event": "begin", "part": name, "status": "running", "limit_s": 3.0})
        send({"event": "row", "part": name, "row": {"pid": os.getpid()}})
        if name == "crashes":
            os._exit(7)
        if name == "hangs":
            time.sleep(60)
        send({"event": "end", "part": name, "status": "ok", "seconds": 0.0, "detail": ""})
        if name == "breaks the device":
            return


def test_parts_that_hang_or_crash_cost_themselves_alone(tmp_path):
    names = ["first", "hangs", "second", "crashes", "breaks the device", "third"]
    record = Record(tmp_path / FILE_NAME, {}, names)
    run_isolated(names, scripted, (), record, time.monotonic() + 100, method="fork")
    parts = parts_in(tmp_path)
    assert {n: p["status"] for n, p in parts.items()} == {n: "failed" if n in ("hangs", "crashes") else "ok" for n in names}
    assert "passed its limit" in parts["hangs"]["detail"] and "exit code 7" in parts["crashes"]["detail"]
    assert all(len(part["rows"]) == 1 for part in parts.values())
    assert len({part["rows"][0]["pid"] for part in parts.values()}) == 4      # a new process after each loss, none without one
    assert table(record).splitlines()[-1] == "FAILED: hangs, crashes"


def stillborn(names, deadline, send):
    raise SystemExit(3)


def test_a_process_that_cannot_start_ends_the_run_and_not_never(tmp_path):
    record = Record(tmp_path / FILE_NAME, {}, ["one", "two"])
    run_isolated(["one", "two"], stillborn, (), record, time.monotonic() + 100, method="fork")
    assert [part["status"] for part in record.parts.values()] == ["failed", "failed"]


# ---- figures that must mean what they say ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = Bench(Settings(scale="tiny", device="cpu", minutes=8, seed=0), lambda event: None)
    bench.begin("part", 600)
    return bench


def test_without_the_shortcut_every_row_walks_every_layer_and_the_tokens_stay(bench, monkeypatch):
    engine, seen = device_speed.speed_engine(bench), []
    for backend in engine.runner.backends.values():
        monkeypatch.setattr(backend, "attend", lambda q, *rest, attend=backend.attend: (seen.append(len(q)), attend(q, *rest))[1])
    prompts, params = device_speed._prompts(engine, 2, 20, seed=0), device_speed.SamplingParams(max_new_tokens=1)
    short = [done.token_ids for done in engine.generate(prompts, params)]
    with device_speed.without_shortcut(engine):
        whole = [done.token_ids for done in engine.generate(prompts, params)]
    owners, layers = engine.geometry.first_shared, engine.geometry.num_layers
    assert seen == [40] * owners + [2] * (layers - owners) + [40] * layers and short == whole
    assert engine.runner.walk.geometry is engine.geometry


def test_the_floor_of_a_window_is_made_of_what_each_request_holds_in_it(bench, monkeypatch):
    # memory binds, whatever arithmetic this machine has left just now
    monkeypatch.setattr(bench, "matmul", lambda: MatmulRate(flop_per_s=1e18, dtype="bfloat16", sizes=(), repeats=1))
    engine = device_speed.speed_engine(bench)
    row = device_speed.decode_row(bench, engine, "model", batch=2, context=32)
    geometry, rate = engine.geometry, bench.bandwidth().bytes_per_s
    first = row["rounds"][0]
    low, high = first["tokens_held"]
    least = first["steps"] * geometry.step_weight_bytes(2)
    assert 32 < low <= high
    for tokens, sign in ((low, -1), (high + first["steps"], 1)):
        kv = 2 * first["steps"] * geometry.kv_cache_bytes(tokens, 2)
        assert sign * ((least + kv) / rate - first["floor_s"]) >= 0
    assert not engine.has_work


def test_a_capture_that_fails_leaves_an_eager_engine_for_the_other_parts(monkeypatch):
    rows: list[dict] = []
    bench = Bench(Settings(scale="tiny", device="cpu", minutes=8, seed=0), rows.append)
    bench.begin("capture", 600)

    def refuse(*args, **kwargs):
        raise RuntimeError("planted")
    monkeypatch.setattr("gemma4_flex.runner.StepGraph.capture", refuse)
    with pytest.raises(RuntimeError, match="planted"):
        device_speed.capture(bench)
    row = device_speed.decode_row(bench, device_speed.speed_engine(bench), "model", batch=1, context=32)
    assert row["rounds"][0]["replayed"] == 0 and "EAGER" in device_speed._of_floor([row])

