"""What depends on vLLM's release: its private names, what we replace in it, and what its releases change. One file per seam.

| file | seam |
|---|---|
| `engine.py` | how settings are built, backends registered, and the state of the engine's loop read |
| `server.py` | the program of vLLM's server: its parser, and how it is run |
| `settings.py` | the settings that are in force, and the limits of a request |
| `requests.py`, `pictures.py` | requests and answers in vLLM's form |
| `kept_ids.py` | the sampler, which records the ids that filters keep |
| `receive.py` | how weights arrive in a worker: the transfer, and the layers during an update |
| `probe.py`, `quantised.py` | the classes of modules, how they are split, and their codes in 8 bits |
| `lora.py` | vLLM's own LoRA |
| `sleep.py` | sleep mode |
| `patches.py` | everything else that we replace |
| `faults.py` | what only the self-test breaks |

Outside of this folder, only names that vLLM documents are imported (`tests/engines/test_vllm_facts.py`).
"""
