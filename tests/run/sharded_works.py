"""The pieces of work of `sharded.py`, by number of ranks."""

METHODS = ("grpo-grpo", "grpo-full", "ppo")
# Methods whose forwards are those of another one here: CI leaves them out.
OTHERS = ("dpo-sigmoid", "rloo", "reinforce++", "scalerl")
ADAPTED = ("grpo-lora",)
# One method with settings that change what is sampled, when, and how it is scored.
SETTINGS = ("filters", "evaluated", "thinking", "ahead")
ALONE = (*METHODS, *ADAPTED, *SETTINGS, "memory")
# The work that breaks the group comes last.
TWO = (
    *METHODS, *ADAPTED, *SETTINGS, "float32", "checkpointed", "uneven",
    "memory", "saved", "resumed", "refused", "stale", "fails:before", "fails:between", "fails:inside",
)  # fmt: skip
FOUR = ("grpo-grpo", "memory", "resumed")
# With DeepSpeed, by number of ranks: a reference model, a value head, an adapter, and what depends on how weights are
# held.
ZERO = {
    2: (
        "grpo-grpo", "grpo-full", "ppo", *ADAPTED, "float32", "checkpointed", "uneven",
        "memory", "saved", "resumed", "crossed", "refused", "stale", "fails:before", "fails:between", "fails:inside",
    ),
    4: ("grpo-grpo", "memory", "resumed"),
}  # fmt: skip
