"""`lockstep merge ADAPTER FOLDER`: writes the base model with an adapter's matrices added, which any program can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.cli.words import WordParser
from lockstep.errors import InputError, writing
from lockstep.files import making_folder
from lockstep.report.say import say

ADAPTER_CONFIG = "adapter_config.json"


def run(words: list[str]) -> int:
    """Merge and save.

    Raises:
        InputError: there is no adapter, its base model cannot be loaded, or the folder exists.
    """
    parser = WordParser(prog="lockstep merge", description=__doc__)
    parser.add_argument("adapter", metavar="ADAPTER", help="checkpoint of a run with use_peft")
    parser.add_argument("folder", metavar="FOLDER", help="directory to write; it must not exist")
    asked = parser.parse_args(words)
    adapter, folder = Path(asked.adapter), Path(asked.folder)
    base = _base_of(adapter)
    if folder.exists():
        raise InputError(f"{folder} exists; give another folder")
    from lockstep.cli.process.quiet import quiet_libraries
    from lockstep.report.busy import busy, watched_by
    from lockstep.report.status import StatusLine

    with watched_by(StatusLine()):
        with busy("loading PyTorch and transformers"):
            quiet_libraries()
            from transformers import AutoTokenizer

            from lockstep.model_files import load_adapter, load_files
            from lockstep.models.policy import load_policy
            from lockstep.models.resolve import resolve_model
        with busy(f"loading {base}"):
            model: Any = load_adapter(load_policy(resolve_model(base)), str(adapter))
        with (
            busy(f"writing {folder}"),
            writing("the merged model", folder, lambda: "make room, and start the same command again"),
            making_folder(folder) as made,
        ):
            model.merge_and_unload().save_pretrained(made)
            load_files(AutoTokenizer, str(adapter)).save_pretrained(made)
    say(f"the merged model is in {folder}")
    return 0


def _base_of(adapter: Path) -> str:
    """The name of the adapter's base model.

    Raises:
        InputError: the directory holds no adapter.
    """
    path = adapter / ADAPTER_CONFIG
    if not path.is_file():
        raise InputError(f"{adapter} has no {ADAPTER_CONFIG}: is it a checkpoint of a run with use_peft?")
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
