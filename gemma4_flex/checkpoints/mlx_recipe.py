"""What a conversion to MLX's format makes of each matrix: a default, and overrides by module path.

    {"mode": "affine", "bits": 4, "group_size": 64,
     "overrides": {"self_attn": {"bits": 8}, "layers.0.mlp": false, "layers.*.mlp.down_proj": {"mode": "mxfp8"}}}

A pattern is one or more whole components of a path that follow each other, anywhere in it, where `*` stands for any one of them:
`gate_proj` is not `per_layer_input_gate`. Of several that match, the last counts. `false` keeps a matrix as it is. A field that
an override leaves out is the default's; where it is null, or the mode is another than the default's, it is the mode's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from gemma4_flex.checkpoints.published import ASSETS
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.mlx_packing import DEFAULTS, MODES, check_format

RECIPES = ASSETS / "recipes"
FIELDS = ("mode", "bits", "group_size")


class Format(NamedTuple):
    """How a matrix is quantised."""

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"affine {self.bits}-bit, groups of {self.group_size}" if self.mode == "affine" else self.mode


@dataclass(frozen=True)
class Recipe:
    """A default, and in the order of the file the formats of patterns, None to keep what they name."""

    name: str
    default: Format
    overrides: tuple[tuple[str, Format | None], ...] = ()

    def plan(self, model: nn.Module) -> dict[str, Format | None]:
        """What becomes of each linear and table of a causal LM, by path: a format, or None where it is kept: where the recipe
        says so, and where groups of the default do not fill its rows. A tied head is the token table's.

        Raises CheckpointError for a pattern that names nothing, and for groups of an override that do not fill a row.
        """
        widths = matrices(model)
        if unknown := [pattern for pattern, _ in self.overrides if not any(matches(pattern, path) for path in widths)]:
            raise CheckpointError(f"recipe {self.name} names {', '.join(unknown)}, and the model has no linear or table of that "
                                  "path: name whole components of one, such as mlp.down_proj")
        plan: dict[str, Format | None] = {}
        for path, width in widths.items():
            found = [(pattern, given) for pattern, given in self.overrides if matches(pattern, path)]
            pattern, given = found[-1] if found else (None, self.default)
            if given is not None and width % given.group_size:
                if pattern is not None:
                    raise CheckpointError(f"recipe {self.name} gives {pattern} groups of {given.group_size}, which do not fill "
                                          f"the {width} values of a row of {path}: give a smaller group_size, or false")
                given = None
            plan[path] = given
        return plan


def matrices(model: nn.Module) -> dict[str, int]:
    """The values a row of each linear and table of a causal LM, by path, but for a tied head."""
    tied = model.config.tie_word_embeddings
    return {path: module.in_features if isinstance(module, nn.Linear) else module.embedding_dim
            for path, module in model.named_modules()
            if (isinstance(module, nn.Linear) or hasattr(module, "embedding_dim")) and not (tied and path == "lm_head")}


def matches(pattern: str, path: str) -> bool:
    """Whether the components of `pattern` follow each other in `path`."""
    wanted, parts = pattern.split("."), path.split(".")
    return any(all(want in ("*", part) for want, part in zip(wanted, parts[start:]))
               for start in range(len(parts) - len(wanted) + 1))


def recipe_names() -> list[str]:
    """Those that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.json"))


def load_recipe(name: str) -> Recipe:
    """A recipe by the name of one that comes with the package, or by the path of a JSON file. Raises CheckpointError."""
    path = RECIPES / f"{name}.json" if name in recipe_names() else Path(name).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"recipe {name} is no file, and none of {', '.join(recipe_names())}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"recipe {name} cannot be read as JSON: {error}") from error
    return parse_recipe(path.stem, data)


def parse_recipe(name: str, data: Any) -> Recipe:
    """The recipe in an object as JSON files have it. Raises CheckpointError for what is no recipe, or no format of MLX's."""
    if not isinstance(data, dict):
        raise CheckpointError(f"recipe {name} is no JSON object: write one with bits, group_size and overrides")
    if surplus := data.keys() - {*FIELDS, "overrides"}:
        raise CheckpointError(f"recipe {name} has {', '.join(sorted(surplus))}: it takes {', '.join(FIELDS)} and overrides")
    overrides = data.get("overrides", {})
    if not isinstance(overrides, dict):
        raise CheckpointError(f"recipe {name} has overrides that are no JSON object: give each pattern an object or false")
    default = _format(name, "the default", {key: data[key] for key in FIELDS if key in data}, None)
    found = tuple((pattern, _override(name, pattern, given, default)) for pattern, given in overrides.items())
    return Recipe(name, default, found)


def _override(name: str, pattern: str, given: Any, default: Format) -> Format | None:
    if not all(pattern.split(".")):
        raise CheckpointError(f"recipe {name} has the pattern {pattern!r}: write whole components of a path between dots")
    if given is False:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"recipe {name} has {given!r} for {pattern}: give an object, or false to keep it")
    if surplus := given.keys() - set(FIELDS):
        raise CheckpointError(f"recipe {name} has {', '.join(sorted(surplus))} for {pattern}, and that takes {', '.join(FIELDS)}")
    return _format(name, pattern, given, default)


def _format(name: str, what: str, given: dict[str, Any], default: Format | None) -> Format:
    mode = given.get("mode") or (default.mode if default else "affine")
    if not isinstance(mode, str) or mode not in DEFAULTS:
        raise CheckpointError(f"recipe {name} gives {what} mode {mode!r}, which is none of {', '.join(MODES)}")
    own = dict(zip(("bits", "group_size"), DEFAULTS[mode]))
    rest = own if default is None or default.mode != mode else {"bits": default.bits, "group_size": default.group_size}
    found = {}
    for field in ("bits", "group_size"):
        value = given.get(field, rest[field])
        found[field] = value = own[field] if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"recipe {name} gives {what} {field} {value!r}: give a whole number")
    try:
        check_format(mode, **found)
    except ValueError as error:
        raise CheckpointError(f"recipe {name} cannot have {what} as it says: {error}") from None
    return Format(mode, **found)
