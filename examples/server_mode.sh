#!/usr/bin/env bash
# Runs a few steps of the recipe of `make train` with vLLM in a process of its own, and then stops the server. (docs/internals/server.md)
#
#     examples/server_mode.sh            three minutes on two CPU cores
#
# With two machines, run `lockstep serve` on the other machine with a key of your own, and `lockstep grpo` here with its URL.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
model=${LOCKSTEP_EXAMPLE_MODEL:-smollm2-135m-instruct}
port=${LOCKSTEP_EXAMPLE_PORT:-8077}
lockstep serve "$model" --port "$port" --max_model_len 512 &
server=$!
trap 'kill $server; wait $server' EXIT
# This command waits for the server itself. It finds the key in the file that the server has written on this machine.
lockstep grpo --config recipes/arithmetic.yaml --model_name_or_path "$model" \
    --vllm_server_base_url "http://127.0.0.1:$port" \
    --max_steps 5 --save_steps 5 --eval_size 16 --output_dir runs/server_mode "$@"
