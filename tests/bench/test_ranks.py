"""Jobs of several processes under torchrun: who does what, the same completions as one process, and a rank that dies."""
from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from gemma4_flex.bench.ranks import LAUNCHER, Ranks
from gemma4_flex.params import SamplingParams
from tests.bench import stub

ROOT = Path(__file__).resolve().parents[2]
GEMMA, QWEN = (ROOT / "scripts" / "benchmarks" / f"{name}_flex_inference.py" for name in ("gemma4", "qwen3"))
HERE = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def places(size: int) -> list[Ranks]:
    return [Ranks(rank, size, rank, launched=True) for rank in range(size)]


# ---- who does what


@pytest.mark.parametrize(("n", "size", "shares"), [(7, 3, [3, 2, 2]), (2, 2, [1, 1]), (5, 1, [5]), (1, 3, [1, 0, 0])])
def test_shares_are_runs_in_the_order_of_ranks_of_almost_one_size(n, size, shares):
    parts = [place.share(list(range(n))) for place in places(size)]
    assert [len(part) for part in parts] == shares
    assert list(chain(*parts)) == list(range(n))


def test_the_environment_of_torchrun_makes_a_rank_and_any_other_one_process():
    launched = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert Ranks.of_environment(launched) == Ranks(2, 4, 0, launched=True)
    for missing in launched:
        assert Ranks.of_environment({k: v for k, v in launched.items() if k != missing}) == Ranks()


def test_ranks_above_the_number_of_prompts_are_idle():
    assert [place.at_most(2).idle for place in places(4)] == [False, False, True, True]
    assert [place.at_most(9) for place in places(2)] == places(2)


def test_without_a_seed_a_prompt_is_seeded_by_its_number_whatever_the_layout():
    params, n = SamplingParams(temperature=1.0, n=2), 5
    (alone,) = (place.params_for(n, params, seed=3) for place in places(1))
    for size in (2, 3, 5):
        assert list(chain(*(place.params_for(n, params, seed=3) for place in places(size)))) == alone
    assert len({one.seed for one in alone}) == n
    assert not {one.seed for one in alone} & {one.seed for one in places(1)[0].params_for(n, params, seed=4)}
    seeded = SamplingParams(temperature=1.0, seed=9)
    assert places(2)[1].params_for(n, seeded, seed=3) is seeded and Ranks().params_for(n, params, seed=3) is params


def test_a_process_alone_needs_nobody():
    alone = Ranks()
    with alone.job():
        alone.join("cpu"), alone.meet()
        assert alone.gather("mine") == ["mine"]


# ---- with real processes


def torchrun(size: int, *command: object) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size), "--", *map(str, command)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Flags of a short run of a tiny model of random weights."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(stub.CONFIG))
    return ["--model_name", f"synthetic:{path}", "--device", "cpu", "--no-compile", "--max_new_tokens", "6",
            "--max_batch_size", "2", "--max_seq_length", "128", "--n_rounds", "1"]


def test_two_ranks_give_the_completions_of_one_process_in_its_order_and_their_counts_add_up(flags, tmp_path):
    flags = [*flags, "--n_prompts", "3", "--n", "2", "--temperature", "4", "--sampling_seed", "7", "--stats_path"]
    assert runpy.run_path(str(GEMMA))["main"]([*flags, str(tmp_path / "one.json")]) == 0
    done = subprocess.run(torchrun(2, GEMMA, *flags, "two.json"), capture_output=True, text=True, env=HERE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("decode tok/s") == 1 and "batch 2 on each of 2 ranks" in done.stdout
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert two["completions"] == one["completions"] and len(one["completions"]) == 6
    tokens = [tuple(c["token_ids"]) for c in one["completions"]]
    assert len(set(tokens[::2])) == 3 and all(tokens[i] != tokens[i + 1] for i in (0, 2, 4))      # another order would be seen
    assert two["workload"] == one["workload"]
    ranks = two["ranks"]
    assert [(rank["rank"], rank["prompts"]) for rank in ranks] == [(0, 2), (1, 1)]
    [job], [alone], shares = two["rounds"], one["rounds"], [rank["rounds"][0] for rank in ranks]
    for name in ("prefill_tokens", "decode_tokens", "prefix_hit_tokens"):
        assert job[name] == sum(share[name] for share in shares) == alone[name]
    assert len(job["ttft_ms"]) == 6
    assert job["wall_s"] == max(share["wall_s"] for share in shares)
    assert job["job_tps"] == (job["prefill_tokens"] + job["decode_tokens"]) / job["wall_s"]
    assert two["steps_eager"] == sum(share["steps_eager"] for share in shares)


def test_a_rank_without_a_prompt_leaves_and_the_others_do_the_job(flags, tmp_path):
    done = subprocess.run(torchrun(2, QWEN, *flags, "--n_prompts", "1", "--stats_path", "r.json"), capture_output=True, text=True,
                          env=HERE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 prompt(s) for 2 ranks" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["ranks"]) == len(result["completions"]) == 1


def children(pid: int) -> dict[str, int]:
    """The ranks that process `pid` started, and their process ids."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
            found |= {variable.removeprefix("RANK="): int(child) for variable in variables if variable.startswith("RANK=")}
    return found


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs /proc to find the ranks")
def test_a_rank_that_is_killed_while_it_generates_ends_the_run_with_an_error_and_no_result(flags, tmp_path):
    command = torchrun(2, GEMMA, *flags[:-1], "100000", "--n_prompts", "4", "--stats_path", "r.json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=HERE, cwd=tmp_path) as job:
        assert any("preparing" in line for line in job.stdout)
        time.sleep(1)      # into the rounds
        os.kill(children(job.pid)["1"], signal.SIGKILL)
        killed = time.monotonic()
        _, said = job.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert job.returncode == 1
    assert "error: rank 0 of 2" in said and "exitcode  : -9" in said
    assert not list(tmp_path.iterdir())


WAITS = """
import os, sys
from gemma4_flex.bench.ranks import LostRankError, Ranks
ranks = Ranks.of_environment()
with ranks.job():
    ranks.join("cpu")
    print(ranks.gather(ranks.rank))
    if sys.argv[1] == "dies" and ranks.rank == 1:
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "sleeps" and ranks.rank == 1:
        input()
    try:
        ranks.meet()
    except LostRankError as error:
        sys.exit(f"{ranks} says: {error}")
"""


@contextlib.contextmanager
def pair(what: str):
    """Two ranks with nobody who watches over them, of which the second dies, or sleeps until something comes on its stdin."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [stack.enter_context(subprocess.Popen([sys.executable, "-c", WAITS, what], env=HERE | {
            "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}, **pipes))
            for rank in "01"]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()


def test_gloo_tells_of_a_dead_rank_where_nobody_watches_over_them():
    with pair("dies") as (first, _):
        out, said = first.communicate(timeout=60)
    assert out == "[0, 1]\n" and first.returncode == 1
    assert said.splitlines()[-1].startswith("rank 0 of 2 says: another rank died"), said


def test_a_rank_that_waits_inside_pytorch_is_ended_by_sigterm_at_once():
    with pair("sleeps") as (first, _):
        assert first.stdout.readline() == "[0, 1]\n"
        time.sleep(0.5)
        first.terminate()
        _, said = first.communicate(timeout=10)
    assert first.returncode == 1 and "error: rank 0 of 2: ended by torchrun" in said
