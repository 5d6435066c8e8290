"""TRL's own GRPOTrainer, unchanged, on Lockstep's proven engine. It needs one assignment before the trainer is made.

    python examples/trl_grpo.py [MODEL]      (trl==1.16.0; vLLM in this process where it is installed, else
    transformers)

The script takes three steps of GRPO on additions, by default with the packaged SmolLM2-135M-Instruct. For every step
it prints the proofs of the push before it, and TRL's own measure of the difference between engine and trainer
log-probs. It takes two minutes on two CPU cores:

    step 1: version 1, 272 tensors as sent, 183 of 183 modules within 4e-06, canary within 6e-05; reward 0.12, …
    step 2: version 2, 272 tensors as sent, 14 of 183 modules within 2e-06, canary within 4e-05; reward 0.25, …
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import warnings
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# TRL 1.16 supports vLLM up to 0.31, and warns about 0.32. Here Lockstep makes the calls to vLLM, so the warning does
# not apply.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM")

SETTINGS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 128,
    "vllm_importance_sampling_mode": "token_truncate",
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 16,
    "max_steps": 3,
    "learning_rate": 1e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def main() -> None:
    from lockstep.cli.output import quiet_libraries

    quiet_libraries()
    import trl
    import trl.trainer.grpo_trainer
    from transformers import PrinterCallback

    from lockstep.extras.trl.vllm_generation import LockstepGeneration
    from lockstep.models.resolve import resolve_model

    trl.trainer.grpo_trainer.VLLMGeneration = LockstepGeneration

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"),
            reward_funcs=first_number,
            args=trl.GRPOConfig(output_dir=folder, **SETTINGS),
            train_dataset=additions(24),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(reporter(trainer.vllm_generation))
        trainer.train()
        trainer.vllm_generation.close()


def additions(rows: int) -> Any:
    """A data set of small sums, as messages."""
    from datasets import Dataset

    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(rows)]
    asked = [
        [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}] for a, b in pairs
    ]
    return Dataset.from_dict({"prompt": asked, "answer": [str(a + b) for a, b in pairs]})


def first_number(completions: list, answer: list[str], **columns: Any) -> list[float]:
    """1 where the first number of a completion is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(re.findall(r"\d+", text)[:1] == [right]) for text, right in zip(texts, answer, strict=True)]


def reporter(generation: Any) -> Any:
    """A callback that prints the proofs of each step's push, and what TRL measured for the tokens."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "reward" not in logs:
                return
            proof = generation.proof
            print(
                f"step {state.global_step}: version {proof.push.version}, {proof.push.tensors} tensors as sent, "
                f"{proof.probe.modules} of {proof.probe.of_modules} modules within {proof.probe.worst[1]:.0e}, "
                f"canary within {proof.canary.max_abs:.0e}; reward {logs['reward']:.2f}, log-probs within "
                f"{logs['sampling/sampling_logp_difference/max']:.0e}, mean ratio "
                f"{logs['sampling/importance_sampling_ratio/mean']:.6f}",
                flush=True,
            )

    return Reporter()


if __name__ == "__main__":
    main()
