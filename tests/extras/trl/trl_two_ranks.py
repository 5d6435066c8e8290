"""One of two trainer ranks, started by `test_trl_ranks.py`. It writes what each call returned or raised, as JSON.

python trl_two_ranks.py RANK PORT MODEL OUT [SERVER_URL, "split" or "tools"]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]


def main() -> None:
    rank, port, model, out, *server = sys.argv[1:]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}
    if server == ["split"]:
        results = with_split_engine(model, Path(out))
    elif server == ["tools"]:
        results = with_tools(int(rank), Path(out).parent)
    elif server:
        results = with_server(int(rank), model, Path(out), server[0])
    else:
        results = with_transformers(int(rank), model, out)
    Path(out).write_text(json.dumps(results), encoding="utf-8")


def shapes(rank: int, generate: Callable[..., Any]) -> dict[str, Any]:
    """Calls in which the ranks have different numbers of prompts, or one rank has an image."""
    images = [None, ["a picture"]] if rank == 1 else None
    return {
        "uneven": tried(lambda: generate([[5, 6], [5, 6], [7]] if rank == 0 else [[8, 9]])),
        "none on the owner": tried(lambda: generate([] if rank == 0 else [[8, 9], [5, 6]])),
        "none on the other": tried(lambda: generate([[8, 9], [5, 6]] if rank == 0 else [])),
        "none at all": tried(lambda: generate([])),
        "images on rank 1": tried(lambda: generate([[4], [5]], images)),
    }


def with_server(rank: int, model: str, out: Path, url: str) -> Any:
    """Run TRL's trainer on both ranks, and then call its generation object directly."""
    from recording import Recording, train

    settings = {
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }
    trainer = train(Recording, model, out.parent / "run", **settings)
    generation = trainer.vllm_generation
    weights = [float(p.double().sum()) for p in generation.model.parameters()]
    calls = [{**vars(call), "worst": call.worst} for call in generation.calls]

    def generate(prompts: list[list[int]], images: Any = None, num_generations: int = 2) -> Any:
        generation.generate(prompts, images, num_generations)
        call = generation.calls[-1]
        return {**vars(call), "worst": call.worst}

    generation.sync_weights()
    found = {**shapes(rank, generate), "after all that": tried(lambda: generate([[5, 6 + rank]]))}
    generation.close()
    return {"calls": calls, "weights": weights, **found}


def with_split_engine(model: str, out: Path) -> Any:
    """Run TRL's trainer on both ranks, with one engine in colocate mode that is split over two workers."""
    from recording import Recording, train

    settings = {"vllm_tensor_parallel_size": 2, "max_steps": 2, "per_device_train_batch_size": 4}
    trainer = train(Recording, model, out.parent / "run", **settings)
    generation = trainer.vllm_generation
    weights = [float(p.double().sum()) for p in generation.model.parameters()]
    calls = [{**vars(call), "worst": call.worst} for call in generation.calls]
    generation.close()
    return {"calls": calls, "weights": weights}


def with_tools(rank: int, folder: Path) -> Any:
    """Run TRL's trainer with a tool on both ranks.

    Rank 0 leaves TRL's tool loop before the first call, and rank 1 makes one.
    """
    import trl
    import trl.trainer.grpo_trainer
    from caller import multiply, save_caller
    from conftest import start
    from datasets import Dataset
    from recording import Recording

    model = save_caller(folder / f"model{rank}")
    engine: Any = start("transformers", model) if rank == 0 else None
    trl.trainer.grpo_trainer.VLLMGeneration = partial(Recording, engine=engine)
    args = trl.GRPOConfig(
        output_dir=str(folder / "run"), use_vllm=True, vllm_mode="colocate", max_steps=1, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=60, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "what is 2"}]] * 8}),
        tools=[multiply],
    )
    if rank == 0:
        trainer.max_tool_calling_iterations = 0
    # The process of rank 1 ends after its refusal. TRL's collective on rank 0 ends with it.
    return tried(lambda: trainer.train() and None)


def with_transformers(rank: int, model: str, out: str) -> Any:
    """The object by itself, the engine on rank 0."""
    from accelerate import Accelerator
    from conftest import start
    from recording import Recording
    from transformers import AutoModelForCausalLM

    from lockstep.errors import EngineLost, ProofError
    from lockstep.tokens.chat import load_tokenizer

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    common = {"model": AutoModelForCausalLM.from_pretrained(model), "accelerator": accelerator}
    common |= {"processing_class": load_tokenizer(model), "max_completion_length": 5, "server_timeout": 5.0}
    engine: Any = start("transformers", model) if rank == 0 else None
    generation = Recording(**common, engine=engine, generation_kwargs={"seed": 1})
    sample = engine.generate if engine else None

    def with_engine(failing: Callable[[Any], Any]) -> Any:
        if engine:
            engine.generate = failing
        found = tried(lambda: generate([[4, 5]]))
        if engine:
            engine.generate = sample
        return found

    def generate(prompts: list[list[int]], images: Any = None) -> Any:
        generation.generate(prompts, images, 1)
        call = generation.calls[-1]
        return {**vars(call), "worst": call.worst}

    def raising(error: BaseException) -> Callable[[Any], Any]:
        def fail(requests: Any) -> Any:
            raise error

        return fail

    def lost_once(requests: Any) -> Any:
        engine.generate = sample
        engine.begin_update()
        raise EngineLost("gone", lambda: None)

    results = {
        "sync": tried(lambda: [generation.sync_weights(), generation.version]),
        **shapes(rank, generate),
        "proof fails": with_engine(raising(ProofError("echo", "other ids", "a cause", "a fix"))),
        "engine breaks": with_engine(raising(ZeroDivisionError("in the engine"))),
        "engine lost for good": with_engine(raising(EngineLost("gone", lambda: None))),
        "engine lost once": with_engine(lost_once),
        "another call": tried(lambda: generation.sync_weights() if rank == 0 else generate([[3]])),
        "refused on rank 1": tried(lambda: Recording(**common, engine=engine, logprobs=rank * 3)),
        "colocated": tried(lambda: Recording(**common)),
        "after all that": tried(lambda: generate([[5, 6 + rank]])),
    }
    answered = results["after all that"]["prompt_ids"][0] + results["after all that"]["completion_ids"][0]
    results["tool loop"] = tried(lambda: generate([[*answered, 7]]))
    results["after the tool loop"] = tried(lambda: generate([[5, 6 + rank]]))
    # Rank 1 stays away; rank 0 must not wait for ever.
    results["alone"] = tried(lambda: alone(rank, Path(out)))
    return results


def alone(rank: int, out: Path) -> Any:
    import time

    from lockstep.rollouts.ranks import Ranks

    ranks, given_up = Ranks(limit=2.0), out.parent / "given-up"
    if rank == 0:
        try:
            return ranks.call("generate", lambda: 1, lambda parts: parts)
        finally:
            given_up.touch()
    deadline = time.monotonic() + 60
    while not given_up.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return None


def tried(step: Callable[[], Any]) -> Any:
    """The result of a step, or the kind and the message of the error that it raises."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return {"raised": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    main()
