"""Compare the two ways to send a LoRA adapter to the engine: packaged model, rank 16. (docs/guides/lora.md)

    python -m benchmarks.servers.adapter_push                    (transformers engine: the parts of a merged push, in
    fp32) python -m benchmarks.servers.adapter_push --engine vllm      (merged weights, compared with the adapter
    alone in vLLM's LoRA) python -m benchmarks.servers.adapter_push --alarms 100       (100 pushes of the adapter
    alone without a fault, with every proof)

The first form prints the seconds of each part of a push, with and without an adapter. The second form prints, for
both ways, the bytes and seconds of a push with its proofs, and the sampled tokens per second. All seconds are medians
of five rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import peft
import torch

from lockstep.contract.protocol import Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments
from lockstep.extras.lora_alone.adapter_proof import AdapterPush, check_adapter_probe
from lockstep.extras.lora_alone.adapter_source import adapter_shape
from lockstep.models.adapters import add_adapter
from lockstep.models.arithmetic import Precision
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.push import ProvenPusher, PushExtension, PushProof
from lockstep.weights.push import push_weights, weights_of
from lockstep.weights.source import Update

MODEL = "smollm2-135m-instruct"
ROUNDS = 5
SEQUENCES, PROMPT, NEW = 32, 64, 32


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median of the seconds that `work` takes."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="dtype of vLLM; the trainer has fp32",
    )
    parser.add_argument("--alarms", type=int, default=0)
    parser.add_argument(
        "--vllms_kernel",
        action="store_true",
        help="measure only the adapter alone, with vLLM's own kernel for CPUs",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.alarms:
        count_alarms(getattr(torch, args.dtype), args.alarms)
    elif args.engine == "vllm":
        if args.vllms_kernel:
            from lockstep.engines.vllm.port import lora as worker

            worker.use_cpu_kernel = lambda slots: None
        for alone in (True,) if args.vllms_kernel else (False, True):
            measure_vllm(getattr(torch, args.dtype), args.rounds, alone=alone)
    else:
        measure_parts()


def adapted(path: str) -> Any:
    config = peft.LoraConfig(
        r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return add_adapter(load_policy(path, None), config)


def measure_parts() -> None:
    path = resolve_model(MODEL)
    engine = TransformersEngine(path, load_tokenizer(path), dtype=torch.float32, max_model_len=256)
    for name in ("plain", "adapted"):
        model = load_policy(path, None) if name == "plain" else adapted(path)
        probe = ModuleProbe(model, engine, torch.float32)
        parts = {
            "reading every tensor": lambda model=model: [None for _ in weights_of(model)],
            "the manifest": lambda model=model: weights_of(model).manifest(0),
            "a whole push": lambda model=model: push_weights(model, engine, 1),
            "a sampled probe": lambda probe=probe: probe.measure(1, every=False),
            "a full probe": lambda probe=probe: probe.measure(1, every=True),
        }
        print(f"{name}: {Update(weights_of(model)).bytes / 2**20:.0f} MiB")
        for part, work in parts.items():
            print(f"  {part}: {seconds(work):.3f} s")


def measure_vllm(dtype: torch.dtype, rounds: int, *, alone: bool) -> None:
    """Measure one way: pushes with their proofs, then sampling."""
    path = resolve_model(MODEL)
    model = adapted(path)
    engine = VLLMInProcess(
        path,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=SEQUENCES,
        engine_kwargs=adapter_arguments(*adapter_shape(model)) if alone else None,
    )
    pusher = ProvenPusher(
        model, engine, dtype, Precision(None), extension=AdapterPush if alone else PushExtension
    )
    proofs: list[PushProof] = []

    def pushed() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.001)
        proofs.append(pusher.push(len(proofs)))

    pushed()
    first = proofs[0].push
    whole = seconds(pushed, rounds)
    alone_in_push = statistics.median(proof.push.seconds for proof in proofs[1:])
    gap = pusher.score_canary(len(proofs)).mean_abs
    print(f"{'adapter alone' if alone else 'merged'}, {dtype}:")
    print(f"  first push: {first.bytes / 1e6:.1f} MB, {first.seconds:.3f} s")
    print(
        f"  later pushes: {proofs[-1].push.bytes / 1e6:.1f} MB, {alone_in_push:.3f} s; {whole:.3f} s with a "
        f"sampled probe"
    )
    print(
        f"  sampling: {tokens_per_second(engine, rounds):.0f} tokens/s ({SEQUENCES} sequences, {NEW} new tokens each)"
    )
    print(f"  canary: mean gap {gap:.1e} nats", flush=True)
    engine.close()


def count_alarms(dtype: torch.dtype, pushes: int) -> None:
    """Push an adapter that grows from almost nothing, without a fault. If a proof fails, the benchmark ends."""
    path = resolve_model(MODEL)
    model = adapted(path)
    engine = VLLMInProcess(
        path, dtype=dtype, max_model_len=256, engine_kwargs=adapter_arguments(*adapter_shape(model))
    )
    pusher = ProvenPusher(model, engine, dtype, Precision(None), extension=AdapterPush)
    draw, largest = (
        torch.Generator().manual_seed(0),
        dict.fromkeys(("adapter_probe", "module_probe", "canary"), 0.0),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.03)
    for version in range(pushes):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.03).add_(1e-4 * torch.randn(parameter.shape, generator=draw))
        proof = pusher.push(version, every_module=True, canary=True)
        added = check_adapter_probe(model, engine.adapters, dtype, version, version, every=True)
        assert proof.canary is not None
        found = {
            "adapter_probe": max(added.values()),
            "module_probe": proof.probe.worst[1],
            "canary": proof.canary.mean_abs,
        }
        largest = {name: max(value, found[name]) for name, value in largest.items()}
    figures = ", ".join(f"{name} {value:.1e}" for name, value in largest.items())
    print(f"{pushes} clean pushes of the adapter alone, {dtype}: 0 alarms; largest figures: {figures}")
    engine.close()


def tokens_per_second(engine: Engine, rounds: int) -> float:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (SEQUENCES, PROMPT), generator=draw).tolist()
    numbers = iter(range(1_000_000))

    def sample() -> None:
        number = next(numbers)
        sampling = Sampling(NEW, min_tokens=NEW)
        # The ids are different in each round, so that the prefix cache has none of them.
        engine.generate(
            [
                GenerationRequest(RequestKey(f"{number}-{i}", 0), [number + 10, *ids[1:]], sampling, i)
                for i, ids in enumerate(prompts)
            ]
        )

    sample()
    return SEQUENCES * NEW / seconds(sample, rounds)


if __name__ == "__main__":
    main()
