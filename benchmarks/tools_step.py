"""A trainer with tools in a process of its own: it takes a step on request and reports how long the step took.

Started by `tools.py` with the name of the program, the model and the seconds of a call. The protocol is that of
`against_trl/play.py`. Both trainers get the same model, prompts, tool and sizes. Every other field has the trainer's default,
except for TRL's fields that `against_trl/play.py` sets too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.append(str(Path(__file__).parent / "against_trl"))

from play import Gate, gated
from tools_model import RESULT, TURN, question

_PROMPTS, _COMPLETIONS, _CALLS = 2, 8, 3
_STEPS = 10_000


def main() -> None:
    program, model, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    # The output of libraries must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainer, mean_length = {"lockstep": lockstep_trainer, "trl": trl_trainer}[program](model, slow(seconds))

    def take() -> dict[str, Any]:
        return {"sampled_tokens": round(mean_length() * _PROMPTS * _COMPLETIONS)}

    trainer.add_callback(gated(Gate(answers, take, lambda: None)))
    trainer.train()


def slow(seconds: float) -> Any:
    """The tool of the model, whose calls take this long."""

    def look(n: int) -> str:
        """Look something up.

        Args:
            n: Where.
        """
        if seconds:
            time.sleep(seconds)
        return RESULT

    return look


def spread(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs inside every group, so that no program can skip a group."""
    return [place % _COMPLETIONS / _COMPLETIONS for place in range(len(completions))]


def fields() -> dict[str, Any]:
    """Fields that both trainers are given."""
    return {
        "num_generations": _COMPLETIONS,
        # Room for all turns and all results.
        "max_completion_length": (_CALLS + 1) * TURN + 128,
        "max_tool_calling_iterations": _CALLS,
        "max_steps": _STEPS,
        # The model must go on sampling turns of the same length.
        "learning_rate": 1e-9,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "shuffle_dataset": False,
        "output_dir": "out",
    }


def data() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"prompt": [question(row) for row in range(_PROMPTS)]})


def lockstep_trainer(model: str, tool: Any) -> tuple[Any, Callable[[], float]]:
    """The trainer, and a function that gives the mean number of sampled tokens per rollout of its last step."""
    from lockstep import GRPOConfig, GRPOTrainer

    config = GRPOConfig(**fields(), per_device_train_batch_size=_PROMPTS * _COMPLETIONS, logging_steps=1)
    trainer = GRPOTrainer(model, spread, config, data(), tools=[tool])
    logged: list[dict[str, float]] = []
    log = trainer.log

    def kept(logs: dict[str, float], *args: Any) -> None:
        log(logs, *args)
        logged.append(dict(logs))

    trainer.log = kept  # type: ignore[method-assign]
    return trainer, lambda: logged[-1]["completions/mean_length"] if logged else 0.0


def trl_trainer(model: str, tool: Any) -> tuple[Any, Callable[[], float]]:
    """As `lockstep_trainer`, for TRL's."""
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **fields(),
        per_device_train_batch_size=_PROMPTS * _COMPLETIONS,
        gradient_checkpointing=False,
        logging_steps=_STEPS,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(model, spread, config, data(), tools=[tool])
    lengths = trainer._metrics["train"]
    return trainer, lambda: (lengths["completions/mean_length"] or [0.0])[-1]


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
