"""What depends on vLLM's release: its private names, what we replace in it, and what its releases change.

One file per seam.

| file | seam |
|---|---|
| `engine.py` | how settings are built and read, the server's program, sleep mode, and places for the faults of the self-test |
| `requests.py` | requests, answers and pictures in vLLM's form |
| `kept_ids.py` | the sampler, which records the ids that filters keep |
| `receive.py` | how weights arrive in a worker: the transfer, and the layers during an update |
| `probe.py`, `quantised.py` | the classes of modules, how they are split, and their codes in 8 bits |
| `lora.py` | vLLM's own LoRA |
| `patches.py` | everything else that we replace |

Outside of this folder, only names that vLLM documents are imported (`tests/engines/test_vllm_facts.py`).
"""  # noqa: E501
