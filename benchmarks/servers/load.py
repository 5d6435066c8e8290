"""Run 64 concurrent rollouts of mixed lengths on a server for ten minutes.

It measures the server's memory, and compares its throughput with that of vLLM in process.

    make server-load      (real vLLM server, SmolLM2-135M; about thirteen minutes on two cores; ARGS="--minutes 2" for
    a quick look)

Both get the same requests with the same seeds in the same order. Both decode at most 64 requests together, with the
same number of threads. First vLLM runs in process, as in a trainer. Then the server answers over HTTP, for as many
rounds as fit into the minutes. (docs/internals/server.md)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CONCURRENT, ROLLOUTS = 64, 160
LENGTHS, PROMPTS = (8, 96), (16, 160)
# The memory of the first round is the reference for the others, so two rounds are the minimum.
_FEWEST_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--in_process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/server_load.json"))
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(in_process()))
        return
    alone = in_separate_process()
    served = on_a_server(args.minutes)
    own = statistics.median(alone)
    # The first round of each is slower, because each number of tokens per decoding step occurs for the first time.
    rate = statistics.median(row["rate"] for row in served[1:])
    first, last = served[0]["bytes"], served[-1]["bytes"]
    print(f"in process {own:.0f} tokens/s; server {rate:.0f} tokens/s: {rate / own:.2f} of it")
    print(
        f"memory after the first round {first / 2**30:.3f} GiB, at the end {last / 2**30:.3f}: {last / first - 1:+.1%}"
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"in_process": alone, "served": served}, indent=1) + "\n", encoding="utf-8"
    )


def requests(seed: int) -> list[Any]:
    """The requests of a round. As in training, there are several per prompt, with very different lengths."""
    from lockstep.contract.protocol import GenerationRequest, RequestKey
    from lockstep.contract.sampling import Sampling

    draw = random.Random(seed)
    batch = []
    for number in range(ROLLOUTS // 4):
        prompt = tuple(draw.randrange(100, 40_000) for _ in range(draw.randint(*PROMPTS)))
        for sample in range(4):
            key = RequestKey(f"r{seed}/{number}", sample)
            batch.append(
                GenerationRequest(key, prompt, Sampling(draw.randint(*LENGTHS)), draw.getrandbits(60))
            )
    return batch


def cache_filling_requests() -> list[Any]:
    """Requests whose prompts have nothing in common. Together they fill the key-value cache."""
    from lockstep.contract.protocol import GenerationRequest, RequestKey
    from lockstep.contract.sampling import Sampling

    draw = random.Random(-1)
    prompts = [tuple(draw.randrange(100, 40_000) for _ in range(500)) for _ in range(CONCURRENT + 8)]
    return [GenerationRequest(RequestKey("fill", i), ids, Sampling(1), i) for i, ids in enumerate(prompts)]


def round_on(engine: Any, seed: int) -> float:
    """Sampled tokens per second of one round."""
    batch = requests(seed)
    start = time.perf_counter()
    answers = engine.generate(batch)
    return sum(len(c.token_ids) for c in answers.values()) / (time.perf_counter() - start)


def in_process() -> list[float]:
    import torch

    from benchmarks.servers.started import MODEL
    from lockstep.engines.vllm.in_process import VLLMInProcess
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.weights.push import push_weights

    path = resolve_model(MODEL)
    engine = VLLMInProcess(path, dtype=torch.float32, max_model_len=512, max_num_seqs=CONCURRENT)
    push_weights(load_policy(path, None), engine, 0)
    return [round_on(engine, seed) for seed in range(3)][1:]


def in_separate_process() -> list[float]:
    """The rates of vLLM in a separate process.

    No server runs at the same time, because two engines would slow each other down.
    """
    command = [sys.executable, "-m", "benchmarks.servers.load", "--in_process"]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, encoding="utf-8")
    return json.loads(found.stdout.splitlines()[-1])


def on_a_server(minutes: float) -> list[dict[str, float]]:
    from benchmarks.servers.started import MODEL, resident_bytes, serving
    from lockstep.connection import connect
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.weights.push import push_weights

    sizes = ["--max_model_len", "512", "--max_num_seqs", str(CONCURRENT)]
    with serving("--dtype", "float32", *sizes) as (url, pid):
        engine = connect(url).engine
        push_weights(load_policy(resolve_model(MODEL), None), engine, 0)
        # Use the whole key-value cache once; otherwise its first use would look like a leak.
        engine.generate(cache_filling_requests())
        rows: list[dict[str, float]] = []
        start = time.monotonic()
        while len(rows) < _FEWEST_ROUNDS or time.monotonic() - start < 60 * minutes:
            rate = round_on(engine, len(rows))
            rows.append({"at": time.monotonic() - start, "rate": rate, "bytes": resident_bytes(pid)})
            print(
                f"{rows[-1]['at']:5.0f} s  {rate:5.0f} tokens/s  {rows[-1]['bytes'] / 2**30:.3f} GiB",
                flush=True,
            )
        engine.close()
    return rows


if __name__ == "__main__":
    main()
