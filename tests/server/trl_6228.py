"""Online DPO on a server as a user of TRL writes it: the script of TRL's #6228. test_online_dpo_script.py runs it."""

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

MODEL = "Qwen/Qwen2-0.5B"
OUTPUT = "online-dpo-on-a-server"


def near_twenty(completions, **kwargs):
    return [-abs(len(c) - 20) for c in completions]


tokenizer = AutoTokenizer.from_pretrained(MODEL)
prompts = ["What is the capital of France?", "Write a short greeting.", "Name a primary color.", "Say hello."]
dataset = Dataset.from_dict({"prompt": prompts})

config = OnlineDPOConfig(
    output_dir=OUTPUT,
    per_device_train_batch_size=2,
    max_steps=2,
    max_new_tokens=32,
    use_vllm=True,
    vllm_mode="server",
    logging_steps=1,
    report_to=[],
)
OnlineDPOTrainer(
    model=MODEL,
    reward_funcs=near_twenty,
    args=config,
    train_dataset=dataset,
    processing_class=tokenizer,
).train()
