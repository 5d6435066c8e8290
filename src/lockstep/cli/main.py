"""`lockstep COMMAND …`: finds the command, and turns every expected error into one line and an exit code.

0 done, 1 the run failed or a proof did, 2 bad input, 130 interrupted (SIGINT), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable

from lockstep.cli.huge_pages import start_anew_with_huge_pages
from lockstep.errors import InputError, LockstepError

_COMMANDS = ("grpo", "rloo", "online-dpo", "reinforce-pp", "ppo", "serve", "verify")
_USAGE = """usage: lockstep COMMAND [--config FILE] [--field value …]

commands:
  grpo          train with GRPO (lockstep grpo --config recipes/arithmetic.yaml; --help lists every field)
  rloo          train with RLOO
  online-dpo    train with Online DPO
  reinforce-pp  train with REINFORCE++
  ppo           train with PPO
  serve         run vLLM's own server for training, behind a key (lockstep serve MODEL)
  verify        prove that trainer and engine agree on a model, before a long run (lockstep verify --model DIRECTORY)
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line, by default this process's own; returns the exit code."""
    # Read when libraries are imported: other programs' progress bars would bury the run's lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # PEFT imports it where it is installed; on a CPU with AVX-512 it then warns of inference kernels that no hub gave it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if words else 2
    if words[0] not in _COMMANDS:
        print(f"lockstep: no command {words[0]!r}; there is: {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if argv is None:
        start_anew_with_huge_pages()
    command = importlib.import_module(f"lockstep.cli.{words[0].replace('-', '_')}")
    return _guarded(lambda: command.run(words[1:]))


def _guarded(command: Callable[[], int]) -> int:
    from lockstep.training.trainers.stop_signals import Interrupted

    try:
        return command()
    except Interrupted as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("lockstep: stopped at once", file=sys.stderr)
        return 130
    except InputError as error:
        # Other libraries' messages may have several lines.
        print(f"lockstep: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
