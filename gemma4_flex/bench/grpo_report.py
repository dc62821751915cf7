"""A GRPO run as lines while it goes, as tables afterwards, and as a picture. Needs no TRL."""
from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

WANTED_RATIO = 3.0      # TRL's own generation over the engine, whole job
LEAST = 1e-10           # where a difference of 0 is drawn on a logarithmic axis

COLUMNS = ("step", "reward", "exact", "tokens", "rollout tok/s", "refresh ms", "|Δ log p| mean", "max", "|ratio - 1| mean", "max",
           "step s", "")
LINE = "{:>4}  {:>6}  {:>5}  {:>6}  {:>13}  {:>10}  {:>14}  {:>8}  {:>16}  {:>8}  {:>6}  {}"


def head() -> str:
    return LINE.format(*COLUMNS).rstrip()


def line(step) -> str:
    """One step (a bench.grpo `Step`) as it goes by. The importance ratios are those before the step's update."""
    a = step.agreement
    apart = [f"{a.delta_mean:.1e}", f"{a.delta_max:.1e}", f"{a.ratio_off_mean:.1e}", f"{a.ratio_off_max:.1e}"] if a else ["-"] * 4
    drift = "" if step.drift is None else f"{'no drift' if step.drift['passed'] else 'DRIFT'}, verified in {step.verify_s:.1f} s"
    return LINE.format(step.step, f"{step.reward:.3f}", f"{step.exact:.0%}", f"{step.mean_tokens:.1f}", f"{step.rollout_tps:,.0f}",
                       "-" if step.refresh_ms is None else f"{step.refresh_ms:.1f}", *apart, f"{step.seconds:.2f}", drift).rstrip()


def tables(result: dict) -> str:
    """What each side learned and took, how exact the rollouts were, and the whole job on both sides."""
    runs = result["runs"]
    rows = [[side, len(r["steps"]), f"{r['reward']['first']:.3f} to {r['reward']['last']:.3f}",
             f"{r['exact']['first']:.0%} to {r['exact']['last']:.0%}",
             f"{r['held_out']['before']:.0%} to {r['held_out']['after']:.0%}", f"{r['rollout_tps']['median']:,.0f}",
             "" if r["refresh_ms"] is None else f"{r['refresh_ms']['median']:.1f}", f"{r['seconds']:.0f}"]
            for side, r in runs.items()]
    edge = max(r["averaged_steps"] for r in runs.values())
    parts = [tabulate(rows, disable_numparse=True, headers=[
        "rollouts by", "steps", f"reward, first and last {edge}", "exact samples", "held out, greedy", "tok/s", "refresh ms", "s"])]
    parts += [exactness(side, r) for side, r in runs.items() if r["agreement"]]
    parts += [job_table(name, job) for name, job in result["jobs"].items()]
    return "\n\n".join(parts)


def exactness(side: str, run: dict) -> str:
    """One sentence each on the importance ratio and on drift."""
    a, drift = run["agreement"], run["drift"]
    verdict = "" if a["tolerance"] is None else f" ({'within' if is_exact(run) else 'NOT within'} {a['tolerance']:.0e})"
    return (f"{side}: importance ratio before the update 1.0 up to {a['ratio_off_mean']:.1e} in a step's mean{verdict} and "
            f"{a['ratio_off_max']:.1e} in any token; |Δ log p| up to {a['delta_mean']:.1e} in a step's mean, {a['delta_max']:.1e} "
            f"in any token; drift verified {drift['verified']} times, found {drift['verified'] - drift['passed']} times")


def is_exact(run: dict) -> bool:
    """Whether the importance ratios before the updates were 1.0 within the dtype's tolerance; True where it has none."""
    a = run["agreement"]
    return a is None or a["tolerance"] is None or a["ratio_off_mean"] <= a["tolerance"]


def job_table(name: str, job: dict) -> str:
    """One whole-job comparison."""
    rows = [[side, *(f"{s[key]:.2f}" for key in ("median", "min", "max")), f"{job['tokens_per_s'][side]['median']:,.0f}"]
            for side, s in job["seconds"].items()]
    ratio, lengths = job["ratio"], job["prompt_tokens"]
    title = (f"{name}: rollouts of {job['prompts']} prompts ({lengths['min']} to {lengths['max']} tokens) x {job['samples']} "
             f"samples, up to {job['max_new_tokens']} tokens; whole jobs, {ratio['n']} rounds in turn")
    reached = "reached" if ratio["median"] >= WANTED_RATIO else "missed"
    return (f"{title}\n{tabulate(rows, headers=['by', 's, median', 'min', 'max', 'tok/s'], disable_numparse=True)}\n"
            f"engine over transformers: {ratio['median']:.2f} x ({ratio['min']:.2f} to {ratio['max']:.2f}); "
            f"wanted {WANTED_RATIO:.0f} x: {reached}")


def plot(result: dict, path: Path) -> None:
    """Reward and share of exact samples by step, a line a side, and what the trainer and the rollout differ by."""
    import matplotlib
    matplotlib.use("Agg")      # no display where this runs
    import matplotlib.pyplot as plt
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for side, run in result["runs"].items():
        steps = [s["step"] for s in run["steps"]]
        left.plot(steps, [s["reward"] for s in run["steps"]], label=f"rollouts by {side}")
        middle.plot(steps, [s["exact"] for s in run["steps"]], label=f"rollouts by {side}")
        if run["agreement"]:
            known = [s for s in run["steps"] if s["agreement"]]
            for key, label in (("delta_max", "max"), ("delta_mean", "mean")):
                right.semilogy([s["step"] for s in known], [max(s["agreement"][key], LEAST) for s in known], label=label)
    for axis, title in ((left, "reward"), (middle, "samples right word for word"), (right, "|log p of trainer - of rollout|")):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    for axis in (left, middle):
        axis.set_ylim(0, 1.02)
    figure.savefig(path, dpi=110)
    plt.close(figure)
