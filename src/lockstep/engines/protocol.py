"""What a program with a training loop of its own asks for (docs/guides/own-trainer.md).

It stands in `lockstep.contract`.
"""

from lockstep.contract.protocol import GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling

__all__ = ["GenerationRequest", "RequestKey", "Sampling", "request_seed"]
