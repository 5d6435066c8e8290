"""Runs one engine in a separate process. It samples a workload on request and reports how long this took.

`settings.py` starts it, writes one line per round ([workload, number]), and reads one JSON line back. The engine is
`VLLMInProcess` as a run starts it. The number of tokens that vLLM found in its prefix cache is read from vLLM's
outputs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# Context length: the longest prompt and completion of the workloads, rounded up to whole blocks of every block size
# that is tried.
_CONTEXT = 640


def main() -> None:
    model, setting = sys.argv[1], json.loads(sys.argv[2])
    # The output of libraries must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    from lockstep.errors import InputError

    try:
        engine, seconds = started(model, setting)
    except InputError as error:
        send({"refused": str(error)})
        return
    send({"start_s": seconds})
    for line in sys.stdin:
        workload, number = json.loads(line)
        send(one_round(engine, requests(model, workload, number)))
    engine.close()


def started(model: str, setting: dict[str, Any]) -> tuple[Any, float]:
    """An engine after a first push of the model's weights, and the seconds that it took to start, without the push."""
    from lockstep.config.run import engine_dtype
    from lockstep.engines.vllm.in_process import VLLMInProcess
    from lockstep.models.policy import load_policy
    from lockstep.weights.push import push_weights

    policy = load_policy(model)
    start = time.perf_counter()
    engine = VLLMInProcess(
        model,
        dtype=engine_dtype("auto"),
        max_model_len=_CONTEXT,
        max_num_seqs=setting["max_num_seqs"],
        engine_kwargs=setting["vllm"],
    )
    seconds = time.perf_counter() - start
    push_weights(policy, engine, 0)
    return engine, seconds


def requests(model: str, name: str, number: int) -> list[Any]:
    """The requests of a step. The completions of a prompt follow each other, and each has its own seed."""
    from benchmarks.against_trl.workloads import prompts, workload
    from lockstep.contract.protocol import GenerationRequest, RequestKey, request_seed
    from lockstep.contract.sampling import Sampling
    from lockstep.tokens.chat import load_tokenizer

    work, tokenizer = workload(name), load_tokenizer(model)
    batch = []
    for row, text in enumerate(prompts(work, model)):
        ids = tuple(tokenizer(text)["input_ids"])
        for key in (RequestKey(str(row), sample) for sample in range(work.completions)):
            batch.append(GenerationRequest(key, ids, Sampling(work.tokens), request_seed(number, 0, key)))
    return batch


def one_round(engine: Any, batch: Sequence[Any]) -> dict[str, float]:
    """Answer requests from an empty prefix cache.

    Returns:
        Wall time and processor time in seconds, sampled tokens, prompt tokens, and how many of these vLLM found in
        its cache.
    """
    import lockstep.engines.vllm.in_process as inside

    cached = 0
    completion = inside.completion

    def counted(key: Any, output: Any, **settings: Any) -> Any:
        nonlocal cached
        cached += output.num_cached_tokens
        return completion(key, output, **settings)

    # Remove the blocks of the previous round; a training step never finds such blocks.
    assert engine.reset_caches(), "vLLM did not empty its prefix cache"
    with patch.object(inside, "completion", counted):
        start, used = time.perf_counter(), time.process_time()
        answers = engine.generate(batch)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "sampled": sum(len(answer.token_ids) for answer in answers.values()),
        "prompt": sum(len(request.prompt_ids) for request in batch),
        "cached": cached,
    }


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
