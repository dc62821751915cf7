"""Keeps the READMEs' tables equal to results/: a table stands between two comments and is written by nobody's hand.

    <!-- results:NAME -->
    (the table of that kind of result, or nothing where results/ has none)
    <!-- /results -->

NAME is one of `result_tables.KINDS`. A plot lies beside its result and carries the result's fingerprint.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from gemma4_flex.bench.result_tables import KINDS

PAGES = ("README.md", "scripts/benchmarks/README.md", "results/README.md")
OPEN, CLOSE = "<!-- results:{} -->", "<!-- /results -->"
BLOCK = re.compile(r"<!-- results:(?P<name>[^ ]+) -->\n(?P<body>.*?)<!-- /results -->", re.DOTALL)
FINGERPRINT = "result-sha256"


class PageError(ValueError):
    """A page whose markers do not pair up or name no kind of result."""


def read_results(folder: Path, pattern: str) -> dict[str, dict]:
    """The records whose file names match, by name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))}


def table(name: str, results: Path, page: Path) -> str:
    """What belongs between the markers of `name` on `page`: lines, or nothing where there is no such result."""
    kind = KINDS[name]
    found = read_results(results, kind.pattern)
    where = os.path.relpath(results, page.parent)
    try:
        told = kind.tell(found, lambda file: Path(where, file).as_posix()) if found else ""
        return f"\n{told}\n\n" if told else ""
    except KeyError as error:
        raise PageError(f"{results}: one of {', '.join(found)} lacks {error}; measure it again with this version") from error


def blocks(page: Path) -> list[re.Match]:
    """The marked places of a page. Raises PageError for one that is unknown or not closed."""
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    if not len(found) == text.count(OPEN.split("{")[0]) == text.count(CLOSE) or any("<!-- results:" in m["body"] for m in found):
        raise PageError(f"{page}: every <!-- results:NAME --> needs a line of its own and a {CLOSE} after it")
    for match in found:
        if match["name"] not in KINDS:
            raise PageError(f"{page}: there is no table {match['name']!r}: use one of {', '.join(KINDS)}")
    return found


def _pages(root: Path) -> list[Path]:
    return [root / page for page in PAGES if (root / page).exists()]


def _stale_plots(root: Path) -> Iterator[tuple[Callable, Path]]:
    """What draws it, and the record, for every result that has a plot which is not drawn from it."""
    for kind in KINDS.values():
        if kind.plot is not None:
            for name, result in read_results(root / "results", kind.pattern).items():
                record = root / "results" / name
                if kind.has_plot(result) and fingerprint_of(record.with_suffix(".png")) != fingerprint(record):
                    yield kind.plot, record


def disagreements(root: Path) -> list[str]:
    """A line for each table and plot that is not what results/ give."""
    found = []
    for page in _pages(root):
        found += [f"{page.relative_to(root)}: the table {match['name']!r} is not what results/ give"
                  for match in blocks(page) if match["body"] != table(match["name"], root / "results", page)]
    return found + [f"{record.with_suffix('.png').relative_to(root)} is not the plot of {record.name}"
                    for _, record in _stale_plots(root)]


def rewrite(root: Path) -> list[str]:
    """Write every table and plot that disagrees; the lines `disagreements` had for them."""
    stale = disagreements(root)
    for page in _pages(root):
        text = BLOCK.sub(lambda m: f"{OPEN.format(m['name'])}\n{table(m['name'], root / 'results', page)}{CLOSE}",
                         page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
    for plot, record in _stale_plots(root):
        draw(plot, record)
    return stale


# ---- plots ----------------------------------------------------------------------------------------------------------

def fingerprint(record: Path) -> str:
    return hashlib.sha256(record.read_bytes()).hexdigest()


def fingerprint_of(picture: Path) -> str | None:
    """The fingerprint of the record that a picture was drawn from; None for one that tells none, or that is not there."""
    from PIL import Image  # comes with matplotlib
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return image.info.get(FINGERPRINT)


def draw(plot: Callable[[dict, Path], None], record: Path) -> Path:
    """Draw a record beside itself, as a PNG that carries the record's fingerprint."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    picture = record.with_suffix(".png")
    plot(json.loads(record.read_text(encoding="utf-8")), picture)
    told = PngInfo()
    told.add_text(FINGERPRINT, fingerprint(record))
    with Image.open(picture) as image:
        image.load()
        image.save(picture, pnginfo=told)
    return picture
