"""`lockstep merge ADAPTER FOLDER`: writes the base model with an adapter's matrices added, which any program can
load.
"""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.cli.help import WordParser
from lockstep.errors import InputError, writing
from lockstep.files import making_folder
from lockstep.safe_text import complain, say

ADAPTER_CONFIG = "adapter_config.json"


def run(words: list[str]) -> int:
    """Merge and save.

    Raises:
        InputError: there is no adapter, its base model cannot be loaded or is not the one that it was trained on, its
            file is not whole, or the folder exists.
    """
    parser = WordParser(prog="lockstep merge", description=__doc__)
    parser.add_argument("adapter", metavar="ADAPTER", help="checkpoint of a run with use_peft")
    parser.add_argument("folder", metavar="FOLDER", help="directory to write; it must not exist")
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="name or directory of the base model; default: the one that the adapter names",
    )
    asked = parser.parse_args(words)
    adapter, folder = Path(asked.adapter), Path(asked.folder)
    base = asked.base or _base_of(adapter)
    if folder.exists():
        raise InputError(f"{folder} exists; give another folder")
    from lockstep.cli.output import quiet_libraries
    from lockstep.progress import StatusLine, busy, watched_by

    with watched_by(StatusLine()):
        with busy("loading PyTorch and transformers"):
            quiet_libraries()
            from transformers import AutoTokenizer

            from lockstep.model_files import load_files
            from lockstep.models.adapters import BASE_FILE, load_adapted
            from lockstep.models.resolve import resolve_model
        with busy(f"loading {base}"):
            model, is_compared = load_adapted(resolve_model(base), adapter)
        if not is_compared:
            complain(
                f"lockstep: {adapter} has no {BASE_FILE}: nothing says whether {base} is the base that the "
                f"adapter was trained on"
            )
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
