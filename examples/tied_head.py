"""A defect in a released engine: every call reports success, but the proofs find it (docs/internals/proof.md has the
story).

    make tied-head         (real vLLM, SmolLM2-135M; about a minute on two CPU cores)

Changed weights are pushed twice: first with Lockstep's repair, and then without it, as in vLLM 0.32.0.
"""

from __future__ import annotations

import os
import sys
import tempfile
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from lockstep.cli.output import quiet_libraries
    from lockstep.extras.verify.stage import open_stage, stage_config

    quiet_libraries()
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    with (
        tempfile.TemporaryDirectory() as folder,
        open_stage(model, stage_config(folder, use_vllm=True, bf16=False)) as stage,
    ):
        import lockstep.engines.vllm.port.receive as backend

        if stage.model.get_output_embeddings().weight is not stage.model.get_input_embeddings().weight:
            sys.exit(f"{model} has a head of its own; this example needs a model with a tied head")
        with stage.moved(0.01, seed=1):
            show(stage, "with the repair")
        with stage.moved(0.01, seed=2), patch.object(backend, "repack_heads", lambda model: None):
            show(stage, "without the repair")


def show(stage, title: str) -> None:  # type: ignore[no-untyped-def]
    """Push the weights, and print what vLLM, the gap and the probe report."""
    from lockstep.weights.push import push_weights

    stage.trainer.state.global_step += 1
    record = push_weights(stage.model, stage.engine, stage.version)
    print(
        f"\n{title}\n  vLLM:   {record.tensors} tensors loaded, weight version {stage.engine.llm.get_weight_version()}"
    )
    gap = stage.gap(stage.sample(stage.sampling()), stage.sampling())
    print(f"  gap:    mean {gap.mean_abs:.1e}, max {gap.max_abs:.1e} over {gap.tokens} sampled tokens")
    found = stage.trainer.proofs.probe.measure(1, every=True)
    named = ", ".join(f"{name} off by {found.errors[name]:.1e} of its size" for name in found.failed)
    print(f"  probe:  {found.modules} modules, {named or 'all as they were sent'}")


if __name__ == "__main__":
    main()
