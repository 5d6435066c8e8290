"""One of several ranks that train a sharded model, or a single rank, started by `test_sharded_training.py`.

python sharded.py RANK PORT KIND RANKS MODEL FOLDER WORK …      (RANKS 0: a single process without a group, and
without shards)

KIND is fsdp or deepspeed.

It writes what each piece of work returned or raised.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from sharded_works import ADAPTED, METHODS, OTHERS, SETTINGS  # noqa: E402

RANK, KIND, RANKS = int(sys.argv[1]), sys.argv[3], int(sys.argv[4])
ZERO_3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
}


def main() -> None:
    _, port, _, _, model, folder, *names = sys.argv[1:]
    if RANKS:
        os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import torch
    from accounts import norm_in_double
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = norm_in_double
    gc.freeze()
    for name in names:
        try:
            found = WORK[name](model, Path(folder))
        except Exception as error:  # noqa: BLE001 - the error is the result
            found = {"raised": type(error).__name__, "message": str(error)}
            print(name, found, file=sys.stderr, flush=True)
        torch.save(found, Path(folder) / f"{name.replace(':', '-')}.{RANK}-{RANKS}.pt")


def trainer(case: str, model: str, folder: Path, **fields: Any) -> Any:
    """A run of float64 weights by AdamW with clipping: eight completions per step, in micro-batches of two or four."""
    from accounts import make, shifted_engine

    ranks = max(RANKS, 1)
    base: dict[str, Any] = {"size": 4 if ranks == 1 else 2, "ranks": ranks}
    if fields.pop("whole", RANKS == 0):
        pass
    elif KIND == "fsdp":
        base["fsdp"] = True
    else:
        base["deepspeed"] = ZERO_3
    # With a smaller epsilon, AdamW would make full-size steps from the rounding of gradients that are almost zero.
    base |= {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-3, "max_grad_norm": 0.05}
    if "engine" not in fields:
        base["engine"] = shifted_engine(model) if RANK == 0 else None
    return make(case, model, folder, **base | fields)


def result(run: Any, **more: Any) -> dict[str, Any]:
    from accounts import gradients

    steps = gradients(run)
    return {
        "gradients": [{name: whole(g) for name, g in step.items()} for step in steps],
        "weights": weights(run),
        "logs": run.state.log_history,
        "tokens": run.state.num_input_tokens_seen,
        **more,
    }


def weights(run: Any) -> dict[str, Any]:
    return {name: whole(p.detach()) for name, p in run.model.named_parameters()}


def whole(tensor: Any) -> Any:
    """A copy of a whole tensor, by torch's own gather."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def of_method(case: str) -> Callable[[str, Path], Any]:
    def work(model: str, folder: Path) -> Any:
        run = trainer(case, model, folder / case)
        found = result(run)
        passes = run.ranks.passes
        return found | {"played": passes.played if passes else 0}

    return work


def with_settings(name: str) -> Callable[[str, Path], Any]:
    """GRPO with filters, with evaluations, with interrupted thinking, or with generations that are sampled ahead."""

    def work(model: str, folder: Path) -> Any:
        from accounts import PROMPTS
        from methods import INTERRUPTED

        fields: dict[str, Any] = {
            "filters": {"top_k": 20, "top_p": 0.9},
            "evaluated": {"evaluation": PROMPTS.select(range(5)), "eval_strategy": "steps", "eval_steps": 1},
            "thinking": {**INTERRUPTED, "max_completion_length": 16},
            "checkpointed": {"gradient_checkpointing": True},
            "ahead": {"max_staleness": 1, "num_iterations": 1, "max_steps": 4},
        }[name]
        return result(trainer("grpo-grpo", model, folder / name, **fields))

    return work


def served(model: str, folder: Path) -> Any:
    """With a real vLLM server: the steps of the sharded and of the whole model; then everything at once, sharded."""
    from accounts import PROMPTS
    from two_ranks import on_server

    def run(kind: str, **fields: Any) -> Any:
        return result(
            trainer("grpo-grpo", model, folder / f"served-{kind}", engine=None, **on_server(), **fields)
        )

    everything: dict[str, Any] = {"top_k": 20, "max_staleness": 1, "num_iterations": 1, "max_steps": 4}
    everything |= {"evaluation": PROMPTS.select(range(5)), "eval_strategy": "steps", "eval_steps": 2}
    return {
        "whole": run("whole", whole=True, num_iterations=1, top_p=0.9),
        "sharded": run("sharded", num_iterations=1, top_p=0.9),
        "everything": run("everything", **everything),
    }


def uneven(model: str, folder: Path) -> Any:
    """The packs of one rank are smaller, so that it has more of them. The other rank plays the rest without weight."""
    from lockstep.shards.model import ShardedModel

    real, played = ShardedModel._play_learning, []

    def counted(self: Any) -> None:
        played.append(1)
        real(self)

    ShardedModel._play_learning = counted  # type: ignore[method-assign]
    try:
        found = result(trainer("grpo-grpo", model, folder / "uneven", token_budget=8 if RANK else 2048))
    finally:
        ShardedModel._play_learning = real  # type: ignore[method-assign]
    return found | {"played": len(played)}


SINGLE: dict[str, Any] = {"model_init_kwargs": {"dtype": "float32"}}


def in_float32(model: str, folder: Path) -> Any:
    """The same run on the same ranks, sharded and with the whole model on each rank. Their packs are the same too."""
    case = "grpo-full"
    return {
        kind: result(trainer(case, model, folder / kind, whole=kind == "whole", **SINGLE))
        for kind in ("sharded", "whole")
    }


def memory(model: str, folder: Path) -> dict[str, Any]:
    """The elements that this rank holds after a step: weights, gradients, and the state of the optimizer."""
    from accounts import Gradients

    run = trainer("grpo-grpo", model, folder / "memory", max_steps=1, num_iterations=1)
    kept = Gradients(run)
    run.train()

    def size(tensors: Any) -> int:
        return sum(t.to_local().numel() if hasattr(t, "to_local") else t.numel() for t in tensors)

    states = run.optimizer.state.values()
    moments = [t for state in states for t in state.values() if hasattr(t, "dim") and t.dim()]
    return {
        "weights": size(run.model.parameters()),
        "gradients": size(kept.steps[0].values()),
        "moments": size(moments),
        "whole": sum(p.numel() for p in run.model.parameters()),
    }


def saved(model: str, folder: Path) -> dict[str, Any]:
    """Four steps with checkpoints, and an export."""
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 1}
    run = trainer("ppo", model, folder / f"saved-{RANKS}", **SINGLE, **fields)
    run.train()
    run.save_model(str(folder / f"export-{RANKS}"))
    return {
        "weights": weights(run),
        "critic": {n: p.detach().clone() for n, p in run.critic.named_parameters()},
    }


def resumed(model: str, folder: Path) -> dict[str, Any]:
    """The last two steps again, from a checkpoint that two ranks have written."""
    return _resumed(model, folder / f"resumed-{RANKS}", folder / "saved-2" / "checkpoint-2")


def crossed(model: str, folder: Path) -> dict[str, Any]:
    """The same, from a checkpoint of the other kind of shards."""
    other = "fsdp" if KIND == "deepspeed" else "deepspeed"
    return _resumed(model, folder / "crossed", folder.parent / other / "saved-2" / "checkpoint-2")


def _resumed(model: str, folder: Path, checkpoint: Path) -> dict[str, Any]:
    import shutil

    run = trainer(
        "ppo",
        model,
        folder,
        max_steps=4,
        save_strategy="no",
        num_iterations=1,
        resume_with_changes=True,
        **SINGLE,
    )
    loaded: dict[str, Any] = {}
    real = run._load_from_checkpoint

    def load(*given: Any, **named: Any) -> None:
        real(*given, **named)
        loaded.update(weights(run))

    run._load_from_checkpoint = load
    if RANK == 0:
        folder.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint / "receipt.jsonl", folder / "receipt.jsonl")
    run.train(resume_from_checkpoint=str(checkpoint))
    return {
        "loaded": loaded,
        "weights": weights(run),
        "critic": {n: p.detach().clone() for n, p in run.critic.named_parameters()},
    }


def fails(where: str) -> Callable[[str, Path], Any]:
    """A rank fails: before its passes, between a forward and its backward, or in the middle of a forward."""

    def work(model: str, folder: Path) -> Any:
        import lockstep.learn.update as step
        import lockstep.shards.passes as passes
        from lockstep.watch.run import RunWatch

        passes.PASS_LIMIT = 5.0
        places = {
            "before": (step, "learn"),
            "between": (RunWatch, "backward"),
            "inside": (step, "score_pack"),
        }
        owner, name = places[where]
        real = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if RANK == 1 and where != "inside":
                raise ZeroDivisionError("by design")
            if RANK == 1:
                args[0].base_model.layers[1].register_forward_pre_hook(_raises)
            return real(*args, **kwargs)

        setattr(owner, name, broken)
        try:
            trainer("grpo-grpo", model, folder / where, max_steps=1, num_iterations=1).train()
        finally:
            setattr(owner, name, real)
        return {}

    return work


def _raises(*_: Any) -> None:
    raise ZeroDivisionError("by design")


def stale(model: str, folder: Path) -> Any:
    """The fault of the self-test: what a forward gathers is not freed again."""
    from lockstep.extras.selftest.weight_faults import WEIGHT_FAULTS
    from lockstep.extras.verify.stage import Stage

    run = trainer("grpo-grpo", model, folder / "stale", num_iterations=1)
    (fault,) = [fault for fault in WEIGHT_FAULTS if fault.id == "W11"]
    stage = Stage(run, ())
    assert not fault.needs(stage)
    with fault.inject(stage):
        run.train()
    return {}


def refused(model: str, folder: Path) -> Any:
    found = {}
    for fields in ({"optim": "adafactor"}, {"sync_ref_model": True, "beta": 0.1}):
        try:
            trainer("grpo-grpo", model, folder / "refused", **fields)
        except ValueError as error:
            found[next(iter(fields))] = str(error)
    return found


WORK: dict[str, Callable[[str, Path], Any]] = {
    **{case: of_method(case) for case in (*METHODS, *OTHERS, *ADAPTED)},
    **{name: with_settings(name) for name in (*SETTINGS, "checkpointed")},
    "served": served,
    "uneven": uneven,
    "float32": in_float32,
    "memory": memory,
    "saved": saved,
    "resumed": resumed,
    "crossed": crossed,
    "refused": refused,
    "stale": stale,
    **{f"fails:{where}": fails(where) for where in ("before", "between", "inside")},
}


if __name__ == "__main__":
    main()
