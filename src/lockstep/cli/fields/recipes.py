"""The recipes that come with Lockstep: config files inside the package, which `--recipe NAME` reads.

In a clone, `src/lockstep/recipes` is a link to `recipes/`; the wheel contains the files.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import lockstep
from lockstep.errors import InputError

RECIPES = Path(lockstep.__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of all recipes, in alphabetical order."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """The file of a recipe.

    Raises:
        InputError: there is no recipe of that name; the message names the recipes.
    """
    names = recipe_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no recipe {name!r}; {hint}The recipes are: {', '.join(names)}")
    return RECIPES / f"{name}.yaml"
