"""One of two trainer ranks, or a single rank, started by `test_two_ranks.py`.

It writes what each piece of work returned or raised.

python two_ranks.py RANK PORT MODEL FOLDER WORK …      (RANK: 0, 1, or alone)
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ALONE = "alone"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def main() -> None:
    rank, port, model, folder, *names = sys.argv[1:]
    if rank != ALONE:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import torch
    from accounts import norm_in_double
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    Qwen2RMSNorm.forward = MixtralRMSNorm.forward = norm_in_double
    # Every run ends with a garbage collection; `gc.freeze` excludes the objects of the libraries from it.
    gc.freeze()
    for name in names:
        found = tried(lambda name=name: {**WORK, **BY_ITSELF}[name](int(rank != "0"), model, Path(folder)))
        torch.save(found, Path(folder) / f"{name.replace(':', '-')}.{rank}.pt")
        if "raised" in found:
            print(name, found, file=sys.stderr)


def cut() -> dict[str, int]:
    """A step in micro-batches of two on each of two ranks, or of four on one."""
    return {"size": 4 if alone() else 2, "ranks": 1 if alone() else 2}


def alone() -> bool:
    return sys.argv[1] == ALONE


def tried(step: Callable[[], Any]) -> Any:
    """The result of a step, or the kind and the message of the error that it raises."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return {"raised": type(error).__name__, "message": str(error)}


def methods(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """Every method, with two micro-batches per rank."""
    from accounts import CASES, OF_ONE_RANK

    return runs([case for case in CASES if case not in OF_ONE_RANK], rank, model, folder)


def other_cases(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """The cases that CI leaves out."""
    from accounts import OF_ONE_RANK

    return runs(OF_ONE_RANK, rank, model, folder)


def experts(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """A mixture of experts with its auxiliary loss."""
    import torch

    # The usual kernel of experts does not take double precision.
    init = {"dtype": torch.float64, "experts_implementation": "eager"}
    fields = {"router_aux_loss_coef": 0.5, "model_init_kwargs": init}
    return runs(["grpo-grpo"], rank, str(folder / "experts"), folder / "of-experts", **fields)


def runs(cases: Sequence[str], rank: int, model: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Gradients, weights and logs of the run of each case."""
    import torch
    from accounts import gradients, make, shifted_engine

    found, engine = {}, shifted_engine(model) if rank == 0 or alone() else None
    for case in cases:
        run = make(case, model, folder / case, engine=engine, **cut(), **fields)
        steps = gradients(run)
        kinds = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
        found[case] = {
            "gradients": steps,
            "weights": {name: p.detach() for name, p in run.model.named_parameters()},
            "logs": run.state.log_history,
            "tokens": run.state.num_input_tokens_seen,
            "wrapped": isinstance(run.model_wrapped, kinds),
        }
    return found


def clipped(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """AdamW, a bound on the gradient's norm, and steps of different parts of a generation."""
    from accounts import make

    run = make("grpo-grpo", model, folder / "clipped", **cut(), **CLIPPED)
    run.train()
    return {
        "weights": {name: p.detach() for name, p in run.model.named_parameters()},
        "logs": run.state.log_history,
    }


CLIPPED: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 0.05}


def resumed(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """Four steps at once; and two steps, then two more in another trainer, with a method of every kind of state."""
    import shutil

    from accounts import make

    from lockstep.run.files.checkpoints import cut_back

    fields = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    found = {}
    for name, checkpoint in (("whole", None), ("resumed", str(folder / "whole" / "checkpoint-2"))):
        run = make("ppo", model, folder / name, size=2, ranks=2, **fields)
        if checkpoint:
            (folder / name).mkdir(exist_ok=True)
            if rank == 0:
                shutil.copy(folder / "whole" / "receipt.jsonl", folder / name)
                cut_back(folder / name, Path(checkpoint))
        run.train(resume_from_checkpoint=checkpoint)
        critic = {f"critic.{name}": p.detach() for name, p in run.critic.named_parameters()}
        found[name] = {name: p.detach().clone() for name, p in run.model.named_parameters()} | critic
    return found


def optimizer_of_one_rank(kind: str) -> Callable[[int, str, Path], Any]:
    """The optimizer of rank 1 is changed: in the middle of a step, by a callback, or after a checkpoint was loaded."""

    def work(rank: int, model: str, folder: Path) -> Any:
        from accounts import make
        from transformers import TrainerCallback

        fields = {
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        run = make("ppo", model, folder / f"optimizer-{kind}", size=2, ranks=2, **fields)
        checkpoint = None

        def decay(*_: Any, **__: Any) -> None:
            for group in run.optimizer.param_groups:
                group["weight_decay"] = 10.0

        def exchange(*_: Any, **__: Any) -> None:
            states = list(run.optimizer.state.values())
            one = states[0]
            other = next(s for s in states[1:] if s["exp_avg"].shape == one["exp_avg"].shape)
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

        class Decays(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if rank == 1 or kind == "callbacks":
                    decay()

        if kind.startswith("callback"):
            run.add_callback(Decays())
        elif kind == "loaded":
            checkpoint = folder / "whole" / "checkpoint-2"
            if rank == 1:
                run._load_scaler = exchange  # type: ignore[method-assign]
        elif rank == 1:
            finish = run.objective.finish_step
            # Called between the last backward and the optimizer.
            run.objective.finish_step = lambda tally: decay() or finish(tally)  # type: ignore[method-assign]
        run.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return {"decay": [group["weight_decay"] for group in run.optimizer.param_groups]}

    return work


def evaluated(rank: int, model: str, folder: Path) -> dict[str, Any]:
    from accounts import PROMPTS, make

    run = make("grpo-grpo", model, folder / "evaluated", **cut(), evaluation=PROMPTS.select(range(5)))
    return {"metrics": run.evaluate(), "history": len(run.state.log_history), "inputs": list(run.inputs)}


def rewards(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """The arguments of each rank's reward function, and what all ranks know afterwards."""
    from accounts import PROMPTS, make

    seen: list[list[str]] = []

    def counting(
        prompts: list[str], completions: list[str], log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float]:
        seen.append(list(prompts))
        log_metric("rank", rank)
        log_extra("scored_by", [rank] * len(prompts))
        return [float(len(text)) for text in completions]

    fields: dict[str, Any] = {
        "reward": counting,
        "evaluation": PROMPTS.select(range(3)),
        "rehearse_rewards": False,
        "recheck_rewards": False,
    }
    run = make("rloo", model, folder / "rewards", ranks=2, size=2, **fields)
    metrics = run.evaluate()
    extras = [r.extra["scored_by"] for group in run.last_eval_groups for r in group.rollouts]
    evaluation, seen = seen, []
    run.train()
    return {
        "evaluation": evaluation,
        "training": seen,
        "extras": extras,
        "metrics": metrics,
        "logs": run.state.log_history,
    }


def judged(rank: int, model: str, folder: Path) -> dict[str, Any]:
    from accounts import PROMPTS

    from lockstep import OnlineDPOConfig, OnlineDPOTrainer

    seen: list[int] = []

    class Judge:
        def judge(self, prompts: list[str], completions: Any, shuffle_order: bool = True) -> list[int]:
            seen.append(len(prompts))
            return [i % 2 for i in range(len(prompts))]

    args = OnlineDPOConfig(
        output_dir=str(folder / "judged"), max_new_tokens=6, max_length=64, per_device_train_batch_size=2, max_steps=1,
        bf16=False, use_vllm=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        rehearse_rewards=False,
    )  # fmt: skip
    run = OnlineDPOTrainer(model, args=args, train_dataset=PROMPTS, judge=Judge())
    run.train()
    return {"seen": seen, "undecided": run.state.log_history[0]["pairs/undecided"]}


def acting(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """Tools, environments and a `rollout_func`. Only the rank with the engine runs them; some rollouts call no tool."""
    from caller import Product, multiply
    from datasets import Dataset

    import lockstep

    class Numbered(Product):
        def get_reward(self) -> float:
            return 100.0 * self.row["number"] + self.calls

    def by_calls(completions: list[Any], number: list[int], **given: Any) -> list[float]:
        seen.append(len(completions))
        assert all(e.row["number"] == n for e, n in zip(given.get("environments", ()), number, strict=False))
        return [
            sum("tool_calls" in message for message in c) + n / 10
            for c, n in zip(completions, number, strict=True)
        ]

    def sampled(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = lockstep.generate_rollout_completions(trainer, prompts, max_tokens=12)
        columns = {
            name: [row[name] for row in found] for name in ("prompt_ids", "completion_ids", "logprobs")
        }
        return {**columns, "size": [len(row["completion_ids"]) for row in found]}

    def by_size(size: list[int], **_: Any) -> list[float]:
        seen.append(len(size))
        return [float(value) for value in size]

    rows = [
        {
            "prompt": [{"role": "user", "content": f"what is {i} + {i}"}],
            "number": i,
            "how": "reset" if i == 3 else "",
        }
        for i in range(8)
    ]
    config = {
        "max_completion_length": 80,
        "num_generations": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "use_vllm": False,
    }
    config |= {
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
        "report_to": [],
        "learning_rate": 1e-3,
    }
    config |= {
        "per_device_train_batch_size": 16 if alone() else 8,
        "rehearse_rewards": False,
        "recheck_rewards": False,
    }
    results = {}
    path = str(folder / "caller")
    for name, given, reward in (
        ("tools", {"tools": [multiply]}, by_calls),
        ("environments", {"environment_factory": Numbered}, by_calls),
        ("function", {"rollout_func": sampled}, by_size),
    ):
        seen: list[int] = []
        args = lockstep.GRPOConfig(output_dir=str(folder / f"acting-{name}"), **config)  # type: ignore[arg-type]
        run = lockstep.GRPOTrainer(path, reward, args, Dataset.from_list(rows), **given)  # type: ignore[arg-type]
        run.train()
        generation = run.loop.generation
        assert generation is not None
        results[name] = {
            "logs": [line for line in run.state.log_history if "loss" in line],
            "weights": {name: p.detach().clone() for name, p in run.model.named_parameters()},
            "scored": seen,
            "rollouts": {
                str(r.key): [r.completion.prompt_ids.tolist(), r.token_ids.tolist(), dict(r.scores), r.failed]
                for group in generation.groups
                for r in group.rollouts
            },
        }
        run.close()
    return results


def odd_rewards(kind: str) -> Callable[[int, str, Path], Any]:
    """A reward function that behaves differently on one rank."""

    def work(rank: int, model: str, folder: Path) -> Any:
        from accounts import by_length, make

        def reward(completion_ids: list[list[int]], **_: Any) -> list[Any]:
            if kind == "nothing" or (kind == "half" and rank == 0):
                return [None] * len(completion_ids)
            if kind == "nans" and rank == 1:
                return [float("nan")] * len(completion_ids)
            if kind == "fails" and rank == 1:
                raise ZeroDivisionError("by design")
            if kind == "few":
                return [1.0]
            if kind == "killed" and rank == 1:
                os._exit(9)
            return by_length(completion_ids)

        # The killed rank is missed at once, or the limit of the whole script is reached first.
        limit = 3600.0 if kind == "killed" else 240.0
        fields = {"max_steps": 1, "vllm_server_timeout": limit, "max_unscored_generations": 1}
        run = make("rloo", model, folder / kind, ranks=2, size=2, reward=reward, **fields)
        run.train()
        return {"logs": run.state.log_history, "steps": run.state.global_step}

    return work


def other_weights(part: str) -> Callable[[int, str, Path], Any]:
    """One rank holds other weights than the other."""

    def work(rank: int, model: str, folder: Path) -> Any:
        import torch
        from accounts import make

        run = make("ppo", model, folder / "other", ranks=2, size=2, max_steps=1)
        if rank == 1:
            module = run.critic if part == "critic" else run.model
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] += 1e-6
        run.train()
        return {}

    return work


def fails_to_learn(rank: int, model: str, folder: Path) -> Any:
    """A forward that fails on one rank only."""
    from accounts import make

    import lockstep.learn.update as step

    real = step.learn

    def learn(*args: Any) -> float:
        if rank == 1:
            raise RuntimeError("out of memory, by design")
        return real(*args)

    step.learn = learn
    try:
        run = make("grpo-grpo", model, folder / "learn", ranks=2, size=2, max_steps=1)
        run.train()
    finally:
        step.learn = real
    return {}


def reversed_on_one_rank(by: str) -> Callable[[int, str, Path], Any]:
    """Hooks that reverse one rank's gradients from the second step on, and that a callback or other code registers."""

    def work(rank: int, model: str, folder: Path) -> Any:
        import torch
        from accounts import make
        from transformers import TrainerCallback

        # With this seed a part of the third step is checked.
        run = make("grpo-grpo", model, folder / f"reversed-{by}", ranks=2, size=2, max_steps=4, seed=8)

        def reverse() -> None:
            if rank == 1 and run.state.global_step == 1:
                for parameter in run.model.parameters():
                    parameter.register_hook(torch.neg)

        class Reverses(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                reverse()

        if by == "callback":
            run.add_callback(Reverses())
        else:
            real = run.loop.micro_step

            def micro_step(batch: Any) -> float:
                reverse()
                return real(batch)

            run.loop.micro_step = micro_step
        try:
            run.train()
        except Exception as error:  # noqa: BLE001 - the error is the result
            return {"raised": type(error).__name__, "message": str(error), "step": run.state.global_step}
        return {}

    return work


def breaks(rank: int, model: str, folder: Path) -> Any:
    """A checkpoint that rank 1 cannot write. Rank 1 fails long before rank 0 writes into the same folder."""
    import torch
    from accounts import make

    run = make(
        "rloo", model, folder / "breaks", ranks=2, size=2, max_steps=2, save_strategy="steps", save_steps=2
    )
    failed, save = folder / "breaks-failed", torch.save

    def full(output_dir: str) -> None:
        failed.touch()
        raise OSError("no space left")

    def late(state: Any, path: str) -> None:
        until = time.monotonic() + 60
        while not failed.exists() and time.monotonic() < until:
            time.sleep(0.01)
        # In this time rank 1 would remove the folder, if it did not wait for the other rank.
        time.sleep(0.5)
        save(state, path)

    if rank == 1:
        run._save_rng_state = full  # type: ignore[method-assign]
    else:
        torch.save = late
    try:
        run.train()
    finally:
        torch.save = save
    return {}


def other_data(kind: str) -> Callable[[int, str, Path], Any]:
    """One rank reads other data than the other."""

    def work(rank: int, model: str, folder: Path) -> Any:
        from accounts import PROMPTS, make
        from datasets import Dataset

        others = {
            "image": lambda: PROMPTS.add_column("image", ["a.png"] * len(PROMPTS)),
            "parts": lambda: Dataset.from_dict({"prompt": [PICTURE] * len(PROMPTS)}),
            "fewer": lambda: PROMPTS.select(range(len(PROMPTS) - 1)),
            "order": lambda: PROMPTS.select(range(len(PROMPTS) - 1, -1, -1)),
            "none": lambda: PROMPTS.select([]),
        }
        data = others[kind]() if rank == 1 else PROMPTS
        make("rloo", model, folder / kind, ranks=2, size=2, data=data, **on_server()).train()
        return {}

    return work


def on_server() -> dict[str, Any]:
    """The fields for the real server, if the tests have started one, or for an engine split over two workers."""
    if os.environ.get("TEST_SPLIT_ENGINE"):
        return {"use_vllm": True, "vllm_tensor_parallel_size": 2}
    url = os.environ.get("TEST_SERVER_URL")
    return {"use_vllm": None, "vllm_server_base_url": url} if url else {}


PICTURE: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
]
OTHER_DATA = ("image", "parts", "fewer", "order", "none")


def served(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """One method with a real server."""
    from accounts import make

    run = make("grpo-grpo", model, folder / "served", size=2, ranks=2, **on_server())
    run.train()
    return {
        "weights": {name: p.detach() for name, p in run.model.named_parameters()},
        "logs": run.state.log_history,
    }


def split(rank: int, model: str, folder: Path) -> dict[str, Any]:
    """One method with one engine for both ranks, split over two workers; alone, with an engine in this process."""
    from accounts import gradients, make

    run = make(
        "grpo-grpo",
        model,
        folder / "split",
        use_vllm=True,
        vllm_tensor_parallel_size=1 if alone() else 2,
        **cut(),
    )
    steps = gradients(run)
    return {
        "gradients": steps,
        "weights": {name: p.detach() for name, p in run.model.named_parameters()},
        "logs": run.state.log_history,
    }


def long_on_one_rank(moment: str) -> Callable[[int, str, Path], Any]:
    """On rank 1 the last positions of long sequences give a layer no gradient. In the middle the run is in bf16."""

    def work(rank: int, model: str, folder: Path) -> Any:
        from unittest.mock import patch

        import torch
        from accounts import make
        from datasets import Dataset
        from transformers import TrainerCallback

        from lockstep.watch import model_gradient

        data = Dataset.from_dict({"prompt": [f"what is {i} + {i} " * 12 for i in range(8)]})
        half = {"bf16": True} if moment == "middle" else {}
        more = {"max_steps": 6, "seed": 0, "model_init_kwargs": {"dtype": torch.float32}, **half}
        run = make("grpo-grpo", model, folder / f"long-{moment}", ranks=2, size=2, data=data, **more)

        def lose() -> None:
            def late(module: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
                return torch.cat([made[:, :56], made[:, 56:].detach()], 1)

            if rank == 1:
                run.model.model.layers[0].mlp.register_forward_hook(late)

        class Loses(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 3:
                    lose()

        if moment == "first":
            lose()
        else:
            run.add_callback(Loses())
        often = patch.multiple(model_gradient, EVERY=2, EVERY_SUM=4)
        try:
            with often:
                run.train()
        except Exception as error:  # noqa: BLE001 - the error is the result
            return {"raised": type(error).__name__, "message": str(error), "step": run.state.global_step}
        return {}

    return work


WORK: dict[str, Callable[[int, str, Path], Any]] = {
    "methods": methods,
    "experts": experts,
    "clipped": clipped,
    "resumed": resumed,
    **{
        f"optimizer:{kind}": optimizer_of_one_rank(kind)
        for kind in ("middle", "callback", "callbacks", "loaded")
    },
    "evaluated": evaluated,
    "rewards": rewards,
    "judged": judged,
    "acting": acting,
    **{f"reward:{kind}": odd_rewards(kind) for kind in ("nothing", "half", "nans", "fails", "few")},
    **{f"weights:{part}": other_weights(part) for part in ("policy", "critic")},
    **{f"data:{kind}": other_data(kind) for kind in OTHER_DATA},
    "breaks": breaks,
    "learn": fails_to_learn,
    **{f"reversed:{by}": reversed_on_one_rank(by) for by in ("callback", "other code")},
    **{f"long:{moment}": long_on_one_rank(moment) for moment in ("first", "middle")},
    "reward:killed": odd_rewards("killed"),
}
# Work that is done in ranks of its own.
BY_ITSELF = {"served": served, "split": split, "other cases": other_cases}


if __name__ == "__main__":
    main()
