#!/usr/bin/env bash
# A run on several nodes under Slurm: the first nodes train, each of the others runs a server. (docs/guides/nodes.md)
#
#     sbatch --nodes 4 examples/nodes/slurm.sh my.yaml
#
# Variables: MODEL, TRAINERS (nodes that train), GPUS (per node), LOCKSTEP (folder of the environment's programs).
# The folder of the run (output_dir in the config) must be on a file system that all nodes see.
#SBATCH --job-name lockstep
#SBATCH --ntasks-per-node 1
#SBATCH --signal B:TERM@300
set -euo pipefail
config=$1
MODEL=${MODEL:?the model that the servers load: the name or folder in the config}
TRAINERS=${TRAINERS:-2}
GPUS=${GPUS:-8}
PATH="${LOCKSTEP:+$LOCKSTEP:}$PATH"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
# Only this job knows the key. It is passed in the environment, which other users cannot read.
LOCKSTEP_SERVER_KEY=$(openssl rand -hex 16)
export LOCKSTEP_SERVER_KEY

urls=()
for node in "${nodes[@]:$TRAINERS}"; do
    srun --nodes 1 --ntasks 1 --nodelist "$node" --overlap \
        lockstep serve "$MODEL" --host "$node" --port 8000 --tensor_parallel_size "$GPUS" &
    urls+=("http://$node:8000")
done

# `lockstep grpo` waits until all servers answer. Slurm sends SIGTERM five minutes before the end of the job's time: the run then
# writes a checkpoint and ends. The same command goes on from there.
ranks=()
for number in $(seq 0 $((TRAINERS - 1))); do
    srun --nodes 1 --ntasks 1 --nodelist "${nodes[$number]}" --overlap \
        torchrun --nnodes "$TRAINERS" --node_rank "$number" --nproc_per_node "$GPUS" \
        --master_addr "$first" --master_port 29500 --shutdown_timeout 270 \
        -m lockstep.cli.main grpo --config "$config" --model_name_or_path "$MODEL" \
        --vllm_server_base_url "$(IFS=,; echo "${urls[*]}")" \
        --vllm_group_host "$first" --vllm_weight_transport gloo &
    ranks+=($!)
done
trap 'kill -TERM "${ranks[@]}" 2> /dev/null' TERM

code=0
for rank in "${ranks[@]}"; do
    # A signal ends a wait early.
    while kill -0 "$rank" 2> /dev/null; do
        wait "$rank" && break || code=$?
    done
done
kill -TERM $(jobs -p) 2> /dev/null || true
wait
exit "$code"
