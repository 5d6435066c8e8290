"""One of two trainer ranks that learn from pictures, or a single rank, started by `test_pictures_on_two_ranks.py`.

python seeing_ranks.py RANK PORT MODEL FOLDER WORK …      (RANK: 0, 1, or alone)
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "run")]
ALONE = "alone"


def main() -> None:
    rank, port, model, folder, *names = sys.argv[1:]
    if rank != ALONE:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import torch
    from two_ranks import tried

    gc.freeze()
    for name in names:
        found = tried(lambda name=name: WORK[name](int(rank == "1"), model, Path(folder) / name))
        torch.save(found, Path(folder) / f"{name}.{rank}.pt")
        if "raised" in found:
            print(name, found, file=sys.stderr)


def learned(rows: Callable[[], list[dict[str, Any]]], completions: int) -> Callable[[int, str, Path], Any]:
    """Two steps of `completions` completions each, over both ranks, and an evaluation."""

    def work(rank: int, model: str, folder: Path) -> dict[str, Any]:
        from datasets import Dataset
        from looking import look

        size = completions if sys.argv[1] == ALONE else completions // 2
        fields = {
            "per_device_train_batch_size": size,
            "shuffle_dataset": False,
            "beta": 0.05,
            "max_grad_norm": 0.0,
        }
        # AdamW would make full-size steps from gradients that are almost zero, and so from their rounding.
        run = look(model, folder, rows(), optim="sgd", **{**fields, "learning_rate": 0.05}, **on_server())
        run.train()
        generation = run.loop.generation
        assert generation is not None
        batches = generation.micro_batches
        return {
            "weights": {name: p.detach().clone() for name, p in run.model.named_parameters()},
            "logs": [line for line in run.state.log_history if "loss" in line],
            "evaluation": run.evaluate(Dataset.from_list(rows())),
            "pictures": [sum(bool(s.pictures) for s in batch) for batch in batches],
            "own": [s.pictures is p.pictures for g, p in _pairs(generation) for s in g],
        }

    return work


def _pairs(generation: Any) -> list[tuple[list[Any], Any]]:
    """The completions of each group of a generation, and the group's prompt."""
    return [([r.completion for r in group.rollouts], group.prompt) for group in generation.groups]


def on_server() -> dict[str, Any]:
    """The fields for the real server, if the test has started one."""
    url = os.environ.get("TEST_SERVER_URL")
    return {"vllm_server_base_url": url} if url else {"use_vllm": False}


def row(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "images": list(images)}


def on_one_rank() -> list[dict[str, Any]]:
    """Four prompts per generation: rank 0 learns from text alone, rank 1 from one picture and from two."""
    from seeing import picture

    texts = [row("what is 2"), row("what is 3 now")]
    return [*texts, row("see", picture(0)), row("see both", picture(1, 16, 16), picture(2))]


def uneven() -> list[dict[str, Any]]:
    """Three prompts per generation: both ranks learn from completions of the second one, which has three pictures."""
    from seeing import picture

    return [row("see", picture(3)), row("see all", *(picture(i) for i in (4, 5, 6))), row("none")]


def unreadable(rank: int, model: str, folder: Path) -> Any:
    """A picture that only rank 1 cannot read: its file ends early there."""
    from looking import look
    from seeing import picture

    files = [folder.parent / f"picture-{rank}-{i}.png" for i in range(4)]
    for i, file in enumerate(files):
        picture(i).save(file)
    if rank == 1:
        files[2].write_bytes(files[2].read_bytes()[:60])
    rows = [row(f"see {i}", str(file)) for i, file in enumerate(files)]
    look(model, folder, rows, per_device_train_batch_size=4, **on_server()).train()
    return {}


def other_pixels(rank: int, model: str, folder: Path) -> Any:
    """The ranks read pictures of the same size and other pixels, so that all ids are equal."""
    from looking import look, same_grid_rows

    look(model, folder, same_grid_rows(seed=rank), per_device_train_batch_size=4, **on_server()).train()
    return {}


def tower_fails(rank: int, model: str, folder: Path) -> Any:
    """The vision tower of rank 1 fails in its forward, for example because its memory is used up."""
    from looking import look

    run = look(
        model, folder, on_one_rank(), per_device_train_batch_size=4, shuffle_dataset=False, **on_server()
    )
    if rank == 1:

        def full(*given: Any) -> Any:
            raise RuntimeError("out of memory, by design")

        run.model.model.visual.register_forward_pre_hook(full)
    run.train()
    return {}


WORK: dict[str, Callable[[int, str, Path], Any]] = {
    "on_one_rank": learned(on_one_rank, 8),
    "uneven": learned(uneven, 6),
    "unreadable": unreadable,
    "other_pixels": other_pixels,
    "tower_fails": tower_fails,
}
# What a single rank can do too.
COMPARED = ("on_one_rank", "uneven")


if __name__ == "__main__":
    main()
