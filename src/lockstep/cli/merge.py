"""`lockstep merge ADAPTER FOLDER`: writes the base model with an adapter's matrices added. Any program can load it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from lockstep.cli.fields import check_model
from lockstep.cli.help import WordParser
from lockstep.errors import InputError, foreign_errors, reason, writing
from lockstep.files import making_folder, what_is_at
from lockstep.model_files import ADAPTER_CONFIG
from lockstep.report.page.kinds import Reader, a_text, mapping
from lockstep.safe_text import complain, say


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
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists; give another folder")
    check_model(base)
    from lockstep.cli.output import quiet_libraries
    from lockstep.progress import StatusLine, busy, watched_by

    with watched_by(StatusLine()), ExitStack() as stack:
        try:
            made = stack.enter_context(making_folder(folder))
        except (OSError, ValueError) as error:
            what = f"{str(folder)[:200]} cannot be made ({reason(error)})"
            raise InputError(f"{what}; give another folder") from error
        with busy("loading PyTorch and transformers"):
            quiet_libraries()
            from transformers import AutoTokenizer

            from lockstep.model_files import load_files
            from lockstep.models.adapters import BASE_FILE, load_adapted
            from lockstep.models.resolve import resolve_model
        with foreign_errors(f"{adapter} has no usable tokenizer, copy its files from the base", InputError):
            tokenizer = load_files(AutoTokenizer, str(adapter))
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
        ):
            model.merge_and_unload().save_pretrained(made)
            tokenizer.save_pretrained(made)
            # The folder gets its name.
            stack.close()
    say(f"the merged model is in {folder}")
    return 0


def _base_of(adapter: Path) -> str:
    """The name of the adapter's base model.

    Raises:
        InputError: the directory holds no adapter.
    """
    path = adapter / ADAPTER_CONFIG
    there = what_is_at(path)
    if there == "does not exist":
        raise InputError(f"{adapter} has no {ADAPTER_CONFIG}: is it a checkpoint of a run with use_peft?")
    if there != "is a file":
        raise InputError(f"{path} {there}; copy the adapter again")
    files = Reader()
    found = files.read(path, mapping({"base_model_name_or_path": a_text}))
    if found is None:
        raise InputError(f"an adapter's settings cannot be read: {files.left_out[0]}; copy the adapter again")
    return str(found["base_model_name_or_path"])
