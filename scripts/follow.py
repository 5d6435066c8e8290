"""Lists the files that a prompt passes through from the data set to the loss, and a parameter on its way to the engine.

    .venv/bin/python scripts/follow.py

Trains a tiny model for one step with vLLM in this process (or with the transformers engine if vLLM is missing). Records each file
of Lockstep with a function that receives the prompt, or an object made from it, and passes it on. Does the same for a parameter.
A reader who follows a prompt or a parameter by hand opens these files.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]


@contextmanager
def noting(carries: Callable[[Any], bool], files: list[str]) -> Iterator[None]:
    """Record the files of Lockstep with a function that receives an object that `carries` accepts and passes it on.

    A function passes it on if it returns such an object, or if it calls a function of another file that returns one. Checks and
    metrics receive such objects and return figures. They are not recorded.
    """
    source = str(ROOT / "src" / "lockstep")

    def file_of(frame: FrameType) -> str:
        name = frame.f_code.co_filename
        return str(Path(name).relative_to(ROOT / "src")) if name.startswith(source) else ""

    def is_given(frame: FrameType) -> bool:
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(carries(frame.f_locals.get(argument)) for argument in given if argument != "self")

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event != "return" or not file_of(frame) or not carries(value) or not is_given(frame):
            return
        caller: FrameType | None = frame
        way: list[str] = []
        while caller is not None:
            if (name := file_of(caller)) and name not in files and name not in way:
                way.append(name)
            caller = caller.f_back
        files.extend(reversed(way))

    # The rollouts' programs run in a thread of their own, which starts later.
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def unnoted(function: Callable[..., None]) -> Callable[..., None]:
    """A function during which `noting` records nothing."""

    def call(*given: Any, **named: Any) -> None:
        note = sys.getprofile()
        sys.setprofile(None)
        try:
            function(*given, **named)
        finally:
            sys.setprofile(note)

    return call


def follow(use_vllm: bool) -> tuple[list[str], list[str]]:
    """The files that a prompt passes through, and the files that a parameter passes through."""
    import datasets
    import torch
    from tiny import save_model

    from lockstep import GRPOConfig, GRPOTrainer
    from lockstep.contract.protocol import Completion, GenerationRequest
    from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
    from lockstep.training.batch.pack import Pack
    from lockstep.training.batch.sequence import TrainingSequence
    from lockstep.training.data.prompt_order import MicroBatch
    from lockstep.training.forward.scoring import TokenScores
    from lockstep.training.methods.objective import TokenBatch
    from lockstep.training.step.generation import Generation
    from lockstep.watch.model_gradient import Checked

    made_of_prompts = (
        Prompt, GenerationRequest, Completion, Rollout, RolloutGroup, TrainingSequence, Generation, Pack, MicroBatch, TokenBatch,
        TokenScores,
    )  # fmt: skip

    def is_prompt(value: Any) -> bool:
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, dict) and value:
            value = next(iter(value.values()))
        if isinstance(value, torch.Tensor):
            # Among tensors, only the loss counts.
            return value.requires_grad
        return isinstance(value, (*made_of_prompts, datasets.Dataset))

    def is_parameter(value: Any) -> bool:
        if isinstance(value, (list, tuple)) and len(value):
            value = value[-1]
        return isinstance(value, (torch.Tensor, torch.nn.Module)) or hasattr(value, "is_model_memory")

    prompts: list[str] = []
    parameters: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(Path(folder) / "model"))
        config = GRPOConfig(
            output_dir=folder,
            use_vllm=use_vllm,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            rehearse_rewards=False,
        )
        data = datasets.Dataset.from_dict({"prompt": ["one", "two"]})
        with noting(is_prompt, prompts):
            trainer = GRPOTrainer(model, lambda completions, **_: list(range(len(completions))), config, data)
        trainer.begin_training()
        item = next(iter(trainer.get_train_dataloader()))
        push = trainer.source.push
        trainer.source.push = lambda version: None  # type: ignore[method-assign]
        # This proof makes short sequences of its own, which lead nowhere.
        trainer.watch.model_gradient.begin = lambda *_: Checked({})  # type: ignore[method-assign]
        # The way ends at the loss. What follows is its backward, sums of the generation's figures, and proofs of them.
        trainer.accelerator.backward = unnoted(trainer.accelerator.backward)
        trainer.watch.hooks.note()
        trainer.loop._finish_step = lambda *_: None  # type: ignore[method-assign]
        with noting(is_parameter, parameters):
            push(0)
        with noting(is_prompt, prompts):
            trainer.training_step(trainer.model, item)
        trainer.close()
    return prompts, parameters


def main() -> int:
    """Print both lists of files."""
    from lockstep.engines.vllm.workers.start import vllm_installed

    prompts, parameters = follow(vllm_installed())
    for what, files in (
        ("a prompt, from the data set to the loss", prompts),
        ("a parameter, to the engine", parameters),
    ):
        print(f"{what}: {len(files)} files")
        for number, name in enumerate(files, 1):
            print(f"  {number:2} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
