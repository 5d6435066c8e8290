"""What a push proves where the engine has weights in 8 bits: codes, a canary with whole inputs, and wider limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.contract.distribution import Distribution
from lockstep.contract.probe import codes_digest, quantised_vector
from lockstep.contract.protocol import Completion, ProbedEngine
from lockstep.engines.servers.messages import agreed_answers
from lockstep.errors import foreign_errors
from lockstep.extras.fp8.quantisation import quantised_rows
from lockstep.extras.fp8.quantised_proof import (
    QuantisationError,
    sample_with_whole_inputs,
    score_with_whole_inputs,
    widened,
)
from lockstep.tokens.chat import embedding_rows
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.push import PushExtension, PushWatch, canary_sequences
from lockstep.watch.receipt_lines import figures
from lockstep.watch.tolerances import Tolerance

_logger = logging.getLogger(__name__)
# Told once, where the sharper canary of an engine in 8 bits is left out.
_COMPILED = (
    "the engine runs compiled programs (CUDA graphs) or packed codes, so its layers in 8 bits cannot leave "
    "their inputs as "
    "they are: the canary without quantised inputs is left out, and log-probs are held to the wider limits of 8 bits. "
    "vllm_engine_kwargs: {enforce_eager: true}, or --enforce-eager for a server, brings it back where "
    "programs are the reason"
)


class RowsInEightBits:
    """How a linear module holds its weights by `fp8_per_channel`, and the input that it quantises without an error."""

    def vector(self, seed: int, module: str, size: int) -> torch.Tensor:
        return quantised_vector(seed, module, size)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        return quantised_rows(rows).values()

    def digest(self, weights: Iterator[torch.Tensor]) -> str:
        rows = [quantised_rows(weight) for weight in weights]
        return codes_digest(torch.cat([r.codes for r in rows]), torch.cat([r.scales for r in rows]))

    def digests(self, engine: ProbedEngine, names: Sequence[str]) -> dict[str, str]:
        def own(server: str) -> list[Any] | None:
            held = [name for name in names if name.rpartition("/")[0] == server]
            return [held] if held else None

        return {
            name: digest
            for server, workers in engine.ask_workers("codes", own).items()
            for name, digest in agreed_answers(workers, server or "the engine").items()
        }


def tensors_in_8_bits(probe: ModuleProbe) -> tuple[str, ...]:
    """Checkpoint names of the weights that the engine holds in 8 bits."""
    quantised = (module for module in probe.modules.probed.values() if module.quantization)
    return tuple(dict.fromkeys(name for module in quantised for name in module.tensors))


class QuantisedPush(PushExtension):
    """What the pushes into an engine in 8 bits prove; `error` measures the quantisation error of the run."""

    def __init__(self, watch: PushWatch) -> None:
        super().__init__(watch)
        self._told = False
        self.error = QuantisationError(
            watch.model, watch.engine_dtype, watch.precision, lambda: tensors_in_8_bits(watch.module_probe)
        )

    def limit(self, of_dtypes: Tolerance) -> Tolerance:
        return widened(of_dtypes, self.error.canary)

    def limit_of_tokens(self, of_dtypes: Tolerance) -> Tolerance:
        return widened(of_dtypes, self.error.of_tokens)

    def prove_canary(self, version: int) -> None:
        watch, error = self.watch, self.error
        sequences = self._sequences()
        error.measure_canary(sequences)
        error.with_whole_inputs = score_with_whole_inputs(
            watch.engine, error, sequences, watch.of_dtypes, version
        )
        if error.with_whole_inputs is None and not self._told:
            self._told = True
            _logger.info(_COMPILED)

    @foreign_errors("the canary could not be sampled without quantised inputs")
    def sample_canary(self, distribution: Distribution, version: int) -> None:
        self.error.sampled_with_whole_inputs = sample_with_whole_inputs(
            self.watch.engine, self.error, self._sequences(), distribution, self.watch.of_dtypes, version
        )

    def _sequences(self) -> dict[str, tuple[int, ...]]:
        return canary_sequences(embedding_rows(self.watch.model), self.watch.engine.settings().max_model_len)

    def measure(
        self, completions: Sequence[Completion], version: int, distribution: Distribution, *, always: bool
    ) -> None:
        if always or self.error.is_due(version):
            self.error.measure(completions, version, distribution, regular=not always)

    def metrics(self) -> dict[str, float]:
        return self.error.metrics()

    def receipt(self) -> dict[str, Any]:
        assert self.watch.proof is not None
        whole = {"canary": self.error.with_whole_inputs, "sampled": self.error.sampled_with_whole_inputs}
        found = {f"{name}_with_whole_inputs": figures(gap) for name, gap in whole.items() if gap is not None}
        return {"quantisation": {"codes": self.watch.proof.probe.codes, **self.error.figures(), **found}}
