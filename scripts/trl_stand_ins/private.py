"""Finds in the source of a test what of TRL's insides it uses, and its models.

`plugin.py` writes both beside the test's outcome.

Such a test cannot be compared: our trainers have other insides, and where it replaces `generate` its completions are
replayed. `trainer._metrics` is not in the list: callbacks of users append to it, and ours have it too.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

GENERATE = re.compile(r"patch(?:\.object)?\([^)\n]*generate\"")
# An attribute with a leading underscore of a trainer or of its class.
ATTRIBUTE = re.compile(r"\b(?:trainer|[A-Z]\w*Trainer)\.(_(?!_|metrics\b)\w+)")
# Parts of TRL's loss, with which tests call the class itself or an object that only pretends to be a trainer.
PART = re.compile(r"\b(?:[A-Z]\w*Trainer|self)\.(get_\w+_mask)\(|object\.__new__\(\w*(Trainer)\)")


MODEL = re.compile(r"trl-internal-testing/([\w.-]+)")


def models(test: Any, name: str) -> str:
    """The models that a test names: in its own name if it has one per model, or else in its source.

    Args:
        test: the test's function.
        name: the test's name, with its parameters in brackets.
    """
    found = MODEL.findall(name) or MODEL.findall(inspect.getsource(inspect.unwrap(test)))
    return " ".join(sorted({*found}))


def insides(test: Any) -> str:
    """What the test uses that is private in TRL, in words; an empty string if nothing.

    Args:
        test: the test's function.
    """
    text = inspect.getsource(inspect.unwrap(test))
    found = ["it patches generate"] if GENERATE.search(text) else []
    found += [f"it uses {name}" for name in sorted({*ATTRIBUTE.findall(text)})]
    found += [f"it calls {name or 'a made-up trainer'}" for name, _ in sorted({*PART.findall(text)})]
    return ", ".join(found)
