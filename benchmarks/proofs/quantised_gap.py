"""How far log-probs move if the engine holds the weights in 8 bits, and what explains it (docs/internals/proof.md).

    python -m benchmarks.proofs.quantised_gap                        (SmolLM2-135M: text, and the canary's ids)
    python -m benchmarks.proofs.quantised_gap --models qwen2 qwen3   (tiny random models of the tests: the canary's ids)
    python -m benchmarks.proofs.quantised_gap --pushes 50            (counts false alarms: 50 pushes without a fault,
    all proofs on)

Real vLLM in bf16, `fp8_per_channel`. The trainer computes in bf16. All figures are differences of log-probs in nats.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import ProofError
from lockstep.extras.fp8.quantised_proof import computing_in_8_bits, quantise_inputs
from lockstep.extras.fp8.quantised_push import QuantisedPush, tensors_in_8_bits
from lockstep.models.arithmetic import Precision
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model
from lockstep.tokens.chat import embedding_rows, load_tokenizer
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.push import ProvenPusher, canary_sequences

HALF, SINGLE, CONTEXT = Precision(torch.bfloat16), Precision(), 512
TEXTS = (
    "The capital of France is Paris, which lies on the river Seine and has about two million inhabitants.",
    "In mathematics, a prime number is a natural number greater than one that has no divisors other than one "
    "and itself.",
    "Once upon a time there was a little girl who lived with her grandmother in a small house near the forest.",
)
Scores = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--pushes", type=int, default=0)
    args = parser.parse_args()
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, folder, args.pushes)


def measure(name: str, folder: str, pushes: int) -> None:
    """Print the figures of one model."""
    import tiny

    path = resolve_model(name)
    if name in tiny.KINDS:
        path = str(tiny.save_model(Path(folder) / name, kind=name, tied=name == "llama"))
    model = load_policy(path)
    engine = VLLMInProcess(path, dtype=torch.bfloat16, max_model_len=CONTEXT, quantization="fp8_per_channel")
    pusher = ProvenPusher(model, engine, torch.bfloat16, HALF, extension=QuantisedPush)
    if pushes:
        count_alarms(name, model, pusher, pushes)
    else:
        proof = pusher.push(1, canary=True)
        print(
            f"{name}: codes of {proof.probe.codes} modules compared, worst module {proof.probe.worst[1]:.1e}"
        )
        sets = {"canary": canary_sequences(embedding_rows(model), CONTEXT)}
        if name not in tiny.KINDS:
            encode = load_tokenizer(path)
            sets["text"] = {f"text{i}": tuple(encode(text).input_ids) for i, text in enumerate(TEXTS)}
        for kind, sequences in sets.items():
            print_gaps(f"{name}, {kind}", model, engine, sequences, tensors_in_8_bits(pusher.module_probe))
    engine.close()


def print_gaps(
    title: str,
    model: Any,
    engine: VLLMInProcess,
    sequences: Mapping[str, tuple[int, ...]],
    tensors: tuple[str, ...],
) -> None:
    """Print the rows of the table for some sequences."""

    def own(precision: Precision) -> Scores:
        return {
            n: completion_logps(model, ids[:1], ids[1:], Sampling(1), precision)
            for n, ids in sequences.items()
        }

    def coarse(precision: Precision, *, inputs_too: bool = True) -> Scores:
        with computing_in_8_bits(model, tensors, torch.bfloat16, inputs_too=inputs_too):
            return own(precision)

    theirs, plain, in_8_bits = engine.score(sequences), own(HALF), coarse(HALF)
    quantise_inputs(engine, False)
    whole = engine.score(sequences)
    quantise_inputs(engine, True)
    rows: dict[str, Callable[[], tuple[Scores, Scores]]] = {
        "engine − trainer": lambda: (theirs, plain),
        "trainer in 8 bits − trainer": lambda: (in_8_bits, plain),
        "engine − trainer in 8 bits": lambda: (theirs, in_8_bits),
        "trainer in 8 bits, bf16 − fp32": lambda: (in_8_bits, coarse(SINGLE)),
        "engine − trainer, inputs not quantised": lambda: (whole, coarse(HALF, inputs_too=False)),
        "trainer, bf16 − fp32": lambda: (plain, own(SINGLE)),
    }
    print(title)
    for row, pair in rows.items():
        one, other = pair()
        gap = GapStats()
        for n in sequences:
            gap += measure_gap(torch.as_tensor(one[n]), torch.as_tensor(other[n]), [n], [len(other[n])])
        print(
            f"  {row:40} mean {gap.mean_abs:.3f}  max {gap.max_abs:.2f}  k3 {gap.k3:.2g}  of {gap.tokens} tokens"
        )


def count_alarms(name: str, model: Any, pusher: ProvenPusher, pushes: int) -> None:
    """Push weights that change by 1e-3 of their size each time, and count the proofs that stop a push."""
    alarms, worst, draw = (
        0,
        {"canary / limit": 0.0, "canary, inputs not quantised": 0.0, "module_probe": 0.0},
        torch.Generator(),
    )
    for version in range(1, pushes + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                parameter += 1e-3 * parameter.abs().mean() * noise
        try:
            proof = pusher.push(version, every_module=True, canary=True)
        except ProofError as error:
            alarms += 1
            print(error)
            continue
        assert proof.canary is not None
        assert isinstance(pusher.extension, QuantisedPush)
        whole = pusher.extension.error.with_whole_inputs
        figures = (
            proof.canary.mean_abs / pusher.limit.mean,
            0.0 if whole is None else whole.mean_abs,
            proof.probe.worst[1],
        )
        worst = {n: max(old, new) for (n, old), new in zip(worst.items(), figures, strict=True)}
    said = ", ".join(f"{n} {value:.2g}" for n, value in worst.items())
    print(f"{pushes} clean pushes of {name} in 8 bits: {alarms} alarms; largest figures: {said}")


if __name__ == "__main__":
    main()
