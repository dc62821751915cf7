"""The device check's result: a JSON file that is whole after every event, and the short table printed last.

A killed run leaves what was measured: parts send events, and each is written before the next is awaited.
"""
from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from gemma4_flex.bench.stats_file import write_json

FILE_NAME = "device_check.json"
TRACEBACK_LINES = 20


class Record:
    """All parts with their status: waiting, running, ok, skipped or failed. `head` is what is known before any part runs."""

    def __init__(self, path: Path, head: dict, parts: list[str]):
        self.path = path
        self.value: dict = {"kind": "device_check", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **head}
        self.parts: dict[str, dict] = {name: {"name": name, "status": "waiting", "rows": []} for name in parts}
        self.write()

    def take(self, event: dict) -> None:
        """Write one event: a part's begin, row or end, or facts about the machine."""
        fields = {name: value for name, value in event.items() if name not in ("event", "part")}
        if event["event"] == "machine":
            self.value |= fields
        elif event["event"] == "row":
            self.parts[event["part"]]["rows"].append(fields["row"])
        else:
            self.parts[event["part"]].update(fields)
            print(progress(self.parts[event["part"]]), flush=True)
        self.write()

    def write(self) -> None:
        # a figure that is not finite, which JSON cannot hold, becomes its name
        plain = json.dumps({**self.value, "parts": list(self.parts.values())}, default=str)
        write_json(json.loads(plain, parse_constant=str), self.path)

    @property
    def passed(self) -> bool:
        """Whether no part failed. A part skipped for want of time or of the thing it needs has not failed, and is told."""
        return all(part["status"] in ("ok", "skipped") for part in self.parts.values())


def failure(text: str, lines: Sequence[str] = ()) -> dict:
    """The fields of a part that failed, with the last lines of its traceback."""
    return {"status": "failed", "detail": text, "traceback": list(lines)[-TRACEBACK_LINES:]}


def progress(part: dict) -> str:
    """A part in one line."""
    if part["status"] == "running":
        return f"... {part['name']} (up to {part['limit_s']:.0f} s)"
    seconds = f"{part['seconds']:.1f} s" if "seconds" in part else ""
    return f"{part['status']:<8}{part['name']:<28}{seconds:>9}  {_short(part.get('detail') or '')}"


def _short(text: str, most: int = 150) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= most else line[: most - 3] + "..."


def table(record: Record) -> str:
    """What the terminal shows last: decode by batch and context, then every part in a line, then the verdict."""
    parts = list(record.parts.values())
    failed = [part["name"] for part in parts if part["status"] not in ("ok", "skipped")]
    lines = [f"{record.value.get('device_name', 'no device')}, torch {record.value.get('versions', {}).get('torch')}, "
             f"transformers {record.value.get('versions', {}).get('transformers')}"]
    lines += _decode_lines([row for part in parts for row in part["rows"] if "ms_per_step" in row])
    lines += [progress(part) for part in parts]
    lines.append(f"FAILED: {', '.join(failed)}" if failed else "no part failed")
    return "\n".join(lines)


def _decode_lines(rows: list[dict]) -> list[str]:
    """Decode rows as columns; the floor is the bytes a step must read over the bandwidth measured in this run."""
    if not rows:
        return []
    head = f"{'decode':<26}{'batch':>6}{'context':>9}{'ms/step':>10}{'tok/s':>11}{'of floor':>10}"
    return [head] + [
        f"{row['what']:<26}{row['batch']:>6}{row['context']:>9}{row['ms_per_step']['median']:>10.3f}{row['tok_s']:>11,.1f}"
        + (f"{row['floor_fraction']:>10.1%}" if row.get("floor_fraction") else "") for row in rows]
