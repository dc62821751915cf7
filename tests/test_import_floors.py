"""The import rule of the package: arrows point from a higher floor to a lower one, never up."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gemma4_flex"

# A room is a module or sub-package right under the package. Rooms of one floor may know each other.
FLOORS = {
    1: {"geometry", "sequence", "page_table", "scheduler", "params", "kernel_options", "text", "request", "sizing", "config_fields",
        "prefix", "logprobs", "stats", "capabilities"},
    2: {"kv_cache", "shared_kv", "masks", "rotary", "attention", "sampling", "step_graph", "compiled", "decode_state",
        "row_attention", "fa4", "draws", "fingerprint", "packed", "ggml_blocks", "ggml_quantize", "mlx_packing", "host_table"},
    3: {"models", "checkpoints"},      # checkpoints need nothing of the engine, and FlexEngine.from_pretrained needs them
    4: {"runner", "backends", "engine", "trace", "prefill", "memory", "prompt_state"},
    5: {"lora", "verify", "bench", "rollout"},
    6: {"serve", "__init__"},
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
# Libraries a floor may use besides the standard one; a floor that is not named here may use any.
LIBRARIES = {1: set(), 2: {"torch", "triton"}}      # torch brings triton with it where there is a GPU
# (module or room, what it may not import although its floor would allow it)
FORBIDDEN = [
    ("gemma4_flex.checkpoints", "gemma4_flex.engine"),
    ("gemma4_flex.lora", "gemma4_flex.engine"),
    ("gemma4_flex.verify.reference64", "gemma4_flex.models"),
    ("gemma4_flex.verify.reference64", "transformers"),
]


def is_within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def room_of(module: str) -> str:
    """The room of a dotted name in the package; the package itself is the room of its __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path, module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, wherever in it, also by importlib with a literal name."""
    found = []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                # `from gemma4_flex import masks` names the room, `from gemma4_flex import FlexEngine` its __init__.
                is_room = base == "gemma4_flex" and alias.name in FLOOR_OF
                found.append((node.lineno, f"{base}.{alias.name}" if is_room else base))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return found


def broken_rules(package: Path) -> list[str]:
    """One line for each import that breaks the rule, and for each room without a floor."""
    broken = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).with_suffix("")
        parts = [part for part in relative.parts if part != "__init__"]
        module = ".".join(["gemma4_flex", *parts])
        room = room_of(module)
        if room not in FLOOR_OF:
            broken.append(f"{relative}: has no floor; give {room!r} one in tests/test_import_floors.py and DESIGN.md")
            continue
        floor = FLOOR_OF[room]
        for line, name in imports_of(path, module):
            where = f"{relative}.py:{line} imports {name}"
            top = name.split(".")[0]
            if any(is_within(module, source) and is_within(name, target) for source, target in FORBIDDEN):
                broken.append(f"{where}: forbidden by name")
            elif top == "gemma4_flex":
                imported = room_of(name)
                if FLOOR_OF.get(imported, 99) > floor:
                    broken.append(f"{where}: an arrow up from floor {floor} to {imported!r}")
            elif floor in LIBRARIES and top not in sys.stdlib_module_names and top not in LIBRARIES[floor]:
                broken.append(f"{where}: floor {floor} may not use {top}")
    return broken


def test_imports_point_one_way():
    assert broken_rules(PACKAGE) == []


def test_every_module_is_walked():
    assert {"params", "sequence", "page_table", "scheduler"} <= {path.stem for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize(
    "file, line, reason",
    [
        ("page_table.py", "import torch", "floor 1 may not use torch"),
        ("params.py", "from torch.nn import functional", "floor 1 may not use torch"),
        ("scheduler.py", "def late():\n    import torch.cuda", "floor 1 may not use torch"),
        ("scheduler.py", "import importlib\nimportlib.import_module('torch')", "floor 1 may not use torch"),
        ("params.py", "import numpy", "floor 1 may not use numpy"),
        ("sequence.py", "from gemma4_flex.engine import FlexEngine", "an arrow up from floor 1 to 'engine'"),
        ("sequence.py", "from gemma4_flex import masks", "an arrow up from floor 1 to 'masks'"),
        ("sequence.py", "from . import masks", "an arrow up from floor 1 to 'masks'"),
        ("sequence.py", "from .kv_cache import KVCache", "an arrow up from floor 1 to 'kv_cache'"),
        ("sequence.py", "from gemma4_flex import FlexEngine", "an arrow up from floor 1 to '__init__'"),
        ("sequence.py", "import gemma4_flex", "an arrow up from floor 1 to '__init__'"),
        ("masks.py", "import transformers", "floor 2 may not use transformers"),
        ("masks.py", "from gemma4_flex.models.gemma4 import Gemma4Walk", "an arrow up from floor 2 to 'models'"),
        ("models/planted.py", "from ..engine import FlexEngine", "an arrow up from floor 3 to 'engine'"),
        ("engine.py", "from gemma4_flex.lora import adapters", "an arrow up from floor 4 to 'lora'"),
        ("checkpoints/planted.py", "from gemma4_flex.engine import FlexEngine", "forbidden by name"),
        ("lora/planted.py", "from ..engine import FlexEngine", "forbidden by name"),
        ("bench/planted.py", "from gemma4_flex.serve import app", "an arrow up from floor 5 to 'serve'"),
        ("verify/reference64.py", "from transformers import AutoModel", "forbidden by name"),
        ("verify/reference64.py", "import gemma4_flex.models.gemma4", "forbidden by name"),
        ("cupboard.py", "import os", "has no floor"),
    ],
)
def test_a_planted_import_is_caught(tmp_path, file, line, reason):
    copy = tmp_path / "gemma4_flex"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    before = broken_rules(copy)
    planted = copy / file
    planted.parent.mkdir(exist_ok=True)
    with planted.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    new = [rule for rule in broken_rules(copy) if rule not in before]
    assert len(new) == 1 and reason in new[0], new
