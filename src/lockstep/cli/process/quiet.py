"""Keeps other libraries' notes and progress bars out of a command's own lines."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """To be called by a command before it imports anything heavy."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
