"""The parser of the commands that have a few arguments and no fields: `serve`, `init`, `compare`, `rollouts`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lockstep.errors import InputError


class WordParser(argparse.ArgumentParser):
    """argparse with whole names only. A mistake raises `InputError`, so that it gets one line and exit code 2."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise InputError(message)
