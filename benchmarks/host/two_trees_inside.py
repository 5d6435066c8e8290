"""The recipe's run of one tree, a step for each line that it reads: the process of `two_trees.py`.

    python -m benchmarks.host.two_trees_inside TREE OUTPUT_DIR STEPS

Answers each line with the seconds and figures of one step, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    tree, folder, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    # vLLM and libraries may print: only answers go to what the other process reads.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    from transformers import TrainerCallback

    import lockstep
    from lockstep.cli.fields import RunArguments, build, data_of, read
    from lockstep.cli.output import quiet_libraries
    from lockstep.report.live import LogLines

    assert Path(lockstep.__file__).is_relative_to(tree), f"{lockstep.__file__} is not of {tree}"
    quiet_libraries()
    line = [
        "--config",
        str(tree / "recipes" / "arithmetic.yaml"),
        "--max_steps",
        steps,
        "--output_dir",
        folder,
    ]
    line += ["--save_strategy", "no", "--eval_strategy", "no", "--disable_tqdm", "True"]
    arguments, config = build(read(line, "grpo"), lockstep.GRPOConfig, RunArguments)
    data = data_of(arguments)
    began = 0.0

    class InTurn(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            answer(ready=True)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal began
            if not sys.stdin.readline():
                raise SystemExit("the other process has ended")
            began = time.perf_counter()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                figures = {name: logs.get(name) for name in ("loss", "grad_norm", "reward")}
                answer(seconds=time.perf_counter() - began, **figures)

    trainer = lockstep.GRPOTrainer(arguments.model_name_or_path, list(data.rewards), config, data.train)
    trainer.remove_callback(LogLines)
    trainer.add_callback(InTurn())
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
