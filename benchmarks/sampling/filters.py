"""Measure what it costs to record the ids that a filter keeps: tokens per second with the record and without it.

    make filters                              (two cores: about three minutes; quiet machine)
    make filters ARGS="--rounds 2"            (a quick look)

One vLLM engine in this process samples the same requests in turn, with and without the record, under the same filter.
Both times include the conversion of vLLM's outputs into completions. The model is SmolLM2-135M with an end token that
it never samples, in the dtype that training chooses on this machine. Figures are medians of the rounds after the
first. Prints one line per filter, with the mean and the largest number of kept ids, and writes
`runs/bench/filters.json`. (docs/internals/methods-measured.md)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec

from benchmarks.against_trl.workloads import make_model
from benchmarks.sampling.engine import requests, started
from benchmarks.sampling.settings import machine
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.engines.vllm.port.requests import completion, sampling_params

FILTERS: dict[str, dict[str, float]] = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "both": {"top_p": 0.95, "top_k": 50},
}
WORKLOAD = "completions-64"


@dataclass(frozen=True)
class Round:
    """One round: tokens per second, and the completions."""

    rate: float
    completions: list[Completion]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds, after one that is not measured"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/filters.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "workload": WORKLOAD, "filters": {}}
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        engine, _ = started(model, {"max_num_seqs": 64, "vllm": {}})
        for name, settings in FILTERS.items():
            found["filters"][name] = measure(engine, model, settings, args.rounds)
            print(f"  {name}: {line(found['filters'][name])}", flush=True)
        engine.close()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(engine: Any, model: str, settings: dict[str, float], rounds: int) -> dict[str, Any]:
    """Tokens per second of one filter with and without the record, and the sizes of the recorded sets."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    sizes: list[int] = []
    lists: list[bytes] = []
    for number in range(rounds + 1):
        plain = requests(model, WORKLOAD, number)
        batch = [replace(r, sampling=replace(r.sampling, max_kept_ids=10**6, **settings)) for r in plain]
        # The order changes from round to round.
        for recorded in (True, False) if number % 2 else (False, True):
            taken = one_round(engine, batch, recorded=recorded)
            rates[recorded].append(taken.rate)
            if recorded:
                sets = [c.kept_ids for c in taken.completions if c.kept_ids is not None]
                sizes += [size for own in sets for size in own.sizes.tolist()]
                # The ids in the form in which a server sends them.
                lists = [
                    msgspec.json.encode([own.part(i, i + 1).ids.tolist() for i in range(len(own))])
                    for own in sets
                ]
    with_record, without = (statistics.median(rates[recorded][1:]) for recorded in (True, False))
    pairs = [one / other for one, other in zip(rates[True][1:], rates[False][1:], strict=True)]
    return {
        "with_record": with_record,
        "without": without,
        "ratio": statistics.median(pairs),
        "ratios": pairs,
        **wire(lists, sum(len(c.token_ids) for c in taken.completions)),
        "mean_set": statistics.mean(sizes),
        "largest_set": max(sizes),
    }


def wire(lists: Sequence[bytes], tokens: int) -> dict[str, float]:
    """Bytes per token of a server's JSON lists, and of int32 in base64; and microseconds per token to read them."""
    start = time.perf_counter()
    read = [msgspec.json.decode(text) for text in lists]
    seconds = time.perf_counter() - start
    ids = [len(own) for completion in read for own in completion]
    return {
        "list_bytes": sum(map(len, lists)) / tokens,
        "base64_bytes": sum(4 * math.ceil(4 * count / 3) for count in ids) / tokens,
        "read_us": 1e6 * seconds / tokens,
    }


def one_round(engine: Any, batch: Sequence[GenerationRequest], *, recorded: bool) -> Round:
    """Answer requests from an empty prefix cache."""
    engine.reset_caches()
    start = time.perf_counter()
    params_by_name = {}
    for request in batch:
        params = sampling_params(request)
        if not recorded:
            params.extra_args = None
        params_by_name[str(request.key)] = request.prompt_ids.tolist(), params
    by_name = {str(request.key): request for request in batch}
    outputs = engine._run(params_by_name)
    found = [
        completion(by_name[output.request_id].key, output, filtered=recorded, adapter=None)
        for output in outputs
    ]
    seconds = time.perf_counter() - start
    return Round(sum(len(c.token_ids) for c in found) / seconds, found)


def line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['with_record']:.0f} tokens/s with the record, {figures['without']:.0f} without: "
        f"{figures['ratio']:.3f}; "
        f"{figures['mean_set']:.0f} ids per token, at most {figures['largest_set']}; as JSON "
        f"{figures['list_bytes']:.0f} bytes per token ({figures['base64_bytes']:.0f} in base64), "
        f"read in {figures['read_us']:.1f} µs"
    )


if __name__ == "__main__":
    main()
