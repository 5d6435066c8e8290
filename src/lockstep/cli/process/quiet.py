"""Turns off the notes and progress bars of other libraries, so that a command shows only its own lines."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Turn them off. A command calls this before it imports anything heavy."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
