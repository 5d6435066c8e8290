"""Predicts how long a step takes on several GPUs, and how to divide them between trainers and servers.

    make plan                                             (8, 64, 512 and 1,024 GPUs, a model of 7 billion parameters)
    make plan ARGS="--model 32b --gpus 64 --tokens 8192 --push_rate 20e9"

The prediction is computed, and the batches of the servers are simulated (`servers.py`). Nothing runs on a GPU. The
constants have three sources: data sheets, published measurements, and measurements of this repository on a CPU.
docs/internals/plan.md lists them.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from benchmarks.plan.servers import Gpu, Lengths, Model, Servers, generation_seconds

MODELS = {
    # Parameters, layers, width, key heads × head size, as in the configs that Qwen publishes for Qwen2.5.
    "1.5b": Model(1.54e9, 28, 1536, 2 * 128),
    "7b": Model(7.62e9, 28, 3584, 4 * 128),
    "32b": Model(32.8e9, 64, 5120, 8 * 128),
    "72b": Model(72.7e9, 80, 8192, 8 * 128),
}
GPUS = {
    "h100": Gpu(compute=989e12, memory_rate=3.35e12, memory=80e9),
    "h200": Gpu(compute=989e12, memory_rate=4.8e12, memory=141e9),
}
# Bytes per parameter of a trainer: weights, gradients and AdamW's moments in float32.
_STATE_BYTES = 16
# Share of a GPU's memory for weights, gradients and moments. Activations need the rest.
_STATE_SHARE = 0.6
_NODE = 8


@dataclass(frozen=True)
class Task:
    """The work of one step.

    Attributes:
        prompts: number of prompts.
        completions: completions per prompt.
        prompt: tokens per prompt.
        lengths: lengths of completions.
    """

    prompts: int
    completions: int
    prompt: int
    lengths: Lengths

    @property
    def sampled(self) -> float:
        """Expected number of sampled tokens."""
        return self.prompts * self.completions * self.lengths.mean


@dataclass(frozen=True)
class Constants:
    """The constants of the prediction.

    Attributes:
        learning: share of a GPU's peak arithmetic that learning reaches.
        recomputed: whether the backward computes activations a second time.
        push_rate: bytes per second of one connection between the first trainer and a server, or between two servers.
        sent: bytes that a push sends, as a share of the bytes of all weights. 1: everything is sent.
        changes: seconds per parameter in which both sides find, digest and put in what has changed; 0 if everything
            is sent.
        host: seconds of processor time per sampled token on a trainer's host, for one rank.
        proofs: share of a step's time that the proofs take.
    """

    learning: float
    recomputed: bool
    push_rate: float
    sent: float
    changes: float
    host: float
    proofs: float


@dataclass(frozen=True)
class Split:
    """A division of the GPUs, and the seconds of a step's parts.

    Attributes:
        trainers: number of GPUs that learn.
        servers: number of servers that sample.
        width: GPUs per server.
        generate, learn, push: seconds of the parts of a step.
    """

    trainers: int
    servers: int
    width: int
    generate: float
    learn: float
    push: float

    def step(self, ahead: bool) -> float:
        """Seconds of a step. If generations are sampled ahead, sampling and learning take place at the same time."""
        return self.push + (max(self.generate, self.learn) if ahead else self.generate + self.learn)


def learning_seconds(task: Task, model: Model, gpu: Gpu, trainers: int, constants: Constants) -> float:
    """Seconds of forward, backward and host work.

    A prompt is computed only once, because its completions share it.
    """
    tokens = task.sampled + task.prompts * task.prompt
    seen = task.prompt + task.lengths.mean / 2
    passes = 8 if constants.recomputed else 6
    arithmetic = passes * (model.parameters + 2 * model.layers * model.width * seen) * tokens
    seconds = (
        arithmetic / (trainers * gpu.compute * constants.learning) + constants.host * task.sampled / trainers
    )
    return seconds / (1 - constants.proofs)


def push_seconds(model: Model, servers: Servers, constants: Constants) -> float:
    """Seconds of a push over gloo: every worker receives the weights in bfloat16, or what has changed of them.

    Gloo's broadcast is a tree. The root of the tree sends all bytes once per level.
    """
    levels = math.ceil(math.log2(servers.number * servers.width + 1))
    sent = constants.sent * 2 * model.parameters * levels / constants.push_rate
    return sent + constants.changes * model.parameters


def fits(model: Model, gpu: Gpu, trainers: int) -> bool:
    """Whether sharded weights, gradients and moments fit into the trainers' memory."""
    return _STATE_BYTES * model.parameters <= trainers * gpu.memory * _STATE_SHARE


def splits(gpus: int, task: Task, model: Model, gpu: Gpu, constants: Constants) -> list[Split]:
    """All divisions in which the model fits.

    They differ by whole nodes, or by single GPUs if there are fewer than two nodes.
    """
    width = model.narrowest(gpu)
    unit = 1 if gpus < 2 * _NODE else _NODE
    found = []
    for trainers in range(unit, gpus, unit):
        servers = (gpus - trainers) // width
        if not servers or not fits(model, gpu, trainers):
            continue
        shape = Servers(servers, width)
        generate = generation_seconds(
            task.prompts, task.completions, task.prompt, task.lengths, model, gpu, shape
        )
        learn = learning_seconds(task, model, gpu, trainers, constants)
        found.append(Split(trainers, servers, width, generate, learn, push_seconds(model, shape, constants)))
    return found


def best(found: list[Split], ahead: bool) -> Split | None:
    """The division with the shortest step. If two are equal, the one with fewer trainers."""
    return min(found, key=lambda split: split.step(ahead), default=None)


def row(gpus: int, task: Task, split: Split | None, ahead: bool) -> str:
    """One line of the table."""
    kind = "ahead" if ahead else "in turns"
    if split is None:
        return f"| {gpus:,} | {kind} | the model does not fit | | | | | | |"
    step = split.step(ahead)
    rate = task.sampled / step / gpus
    return (
        f"| {gpus:,} | {kind} | {split.trainers} | {split.servers} × {split.width} | {split.generate:.1f} s | "
        f"{split.learn:.1f} s "
        f"| {split.push:.1f} s | **{step:.1f} s** | {rate:,.0f} |"
    )


HEAD = """| GPUs | generations | trainer GPUs | servers × GPUs | generate | learn | push | step | tokens per second and GPU |
|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 64, 512, 1024])
    parser.add_argument("--prompts", type=int, default=512, help="prompts per step")
    parser.add_argument("--completions", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=4096, help="mean tokens of a completion")
    parser.add_argument("--longest", type=int, default=4, help="longest completion, divided by the mean")
    parser.add_argument(
        "--spread", type=float, default=0.6, help="standard deviation of the logarithm of the length"
    )
    parser.add_argument(
        "--learning", type=float, default=0.4, help="share of the GPU's arithmetic in learning"
    )
    parser.add_argument("--no_recomputation", action="store_true", help="keep all activations")
    parser.add_argument("--push_rate", type=float, default=1e9, help="bytes per second into one server")
    parser.add_argument(
        "--sent", type=float, default=1 / 38, help="bytes of a push, divided by those of all weights"
    )
    parser.add_argument(
        "--changes", type=float, default=1e-9, help="seconds per parameter to find and put in changes"
    )
    parser.add_argument("--whole_pushes", action="store_true", help="every push sends all weights")
    parser.add_argument("--host", type=float, default=4e-6, help="seconds of host work per sampled token")
    parser.add_argument("--proofs", type=float, default=0.05, help="share of a step that proofs take")
    args = parser.parse_args()
    model, gpu = MODELS[args.model], GPUS[args.gpu]
    lengths = Lengths(args.tokens, args.longest * args.tokens, args.spread)
    sent, changes = (1.0, 0.0) if args.whole_pushes else (args.sent, args.changes)
    recomputed = not args.no_recomputation
    constants = Constants(args.learning, recomputed, args.push_rate, sent, changes, args.host, args.proofs)
    task = Task(args.prompts, args.completions, args.prompt, lengths)
    print(
        f"{args.model} on {args.gpu}; {task.prompts} × {task.completions} completions of {args.tokens:,} "
        f"tokens in the mean, "
        f"{lengths.longest:,} at most\n"
    )
    print(HEAD)
    for gpus in args.gpus:
        found = splits(gpus, task, model, gpu, constants)
        for ahead in (False, True):
            print(row(gpus, task, best(found, ahead), ahead))


if __name__ == "__main__":
    main()
