"""Reads a YAML file of fields: each field once, with a value, a list of values or a mapping."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lockstep.errors import InputError, one_line

# Configs of all fields have a few KiB.
_LARGEST = 1 << 20
_BOOL, _TEXT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "str", "float"))
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


def read_file(path: str) -> dict[str, Any]:
    """The fields of a config file.

    Raises:
        InputError: the file is missing, is not text, is not YAML, names a field twice, or has values of another form.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"config file {path or '(no name)'} does not exist")
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST + 1)
    except OSError as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    if len(text) > _LARGEST:
        raise InputError(
            f"config file {path} has more than {_LARGEST >> 20} MiB; it must hold fields with values, one per line"
        )
    try:
        content = yaml.load(text.decode("utf-8-sig"), Loader=_Fields)
    except UnicodeDecodeError as error:
        raise InputError(f"config file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise InputError(f"config file {path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a date or a number that YAML recognises and Python cannot represent.
        raise InputError(f"config file {path} is not YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"config file {path} must hold fields with values, one per line")
    for name, value in content.items():
        _check_value(path, name, value)
    return content


def _check_value(path: str, name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise InputError(f"config file {path}: {name!r} is not the name of a field")
    if isinstance(value, list) and any(isinstance(entry, list | dict) or entry is None for entry in value):
        raise InputError(f"config file {path}: {name} must be a value, a list of values or a mapping")


class _Fields(yaml.SafeLoader):
    """YAML without repeated keys, of which the last would win in silence, and without aliases, which can grow without bound.

    Only `true` and `false` are booleans. YAML 1.1 also reads yes, no, on and off as such, which are choices and texts of fields.
    In the mapping of a field, such as `lr_scheduler_kwargs`, 1e-7 is a number, as it is in YAML 1.2 and in JSON; YAML 1.1 demands
    1.0e-7. The value of a field itself needs no such rule: the field knows its type.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        first: [(tag, form) for tag, form in forms if tag != _BOOL or first in "tTfF"]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not supported", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if isinstance(node, yaml.MappingNode):
            for _, value in node.value:
                if isinstance(value, yaml.MappingNode):
                    _read_numbers(value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_numbers(node: yaml.Node) -> None:
    """Mark what is written as a number with an exponent, at any depth of a mapping or a list, as a number."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _TEXT and node.style is None and _NUMBER.fullmatch(node.value):
            node.tag = _FLOAT
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            _read_numbers(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _read_numbers(value)
