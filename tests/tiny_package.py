"""A tiny stand-in for the packaged model: a GGUF file with two layers and the tokenizer of `tests/tiny.py`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tiny import END, TEMPLATE, make_tokenizer

from lockstep.models import packaged

_SIZE, _INNER, _LAYERS = 32, 64, 2


def save_package(site: Path) -> None:
    """Write the package into a folder that is to stand in `sys.path`."""
    about = site / f"{packaged.MODULE}-{packaged.VERSION}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {packaged.PACKAGE}\nVersion: {packaged.VERSION}\n"
    )
    package = site / packaged.MODULE
    package.mkdir()
    (package / "__init__.py").touch()
    _write_model(package / packaged.GGUF)


def _write_model(path: Path) -> None:
    described = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    # transformers adds the last one if it is not there.
    tokens = [*sorted(described["vocab"], key=described["vocab"].get), "<|endoftext|>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(_SIZE)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
    writer.add_eos_token_id(described["vocab"][END])
    writer.add_bos_token_id(described["vocab"][END])
    writer.add_pad_token_id(described["vocab"][END])
    writer.add_chat_template(TEMPLATE)
    chance = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (0.3 * chance.standard_normal(shape)).astype(np.float32))

    add("token_embd", len(tokens), _SIZE)
    add("output_norm", _SIZE)
    for layer in range(_LAYERS):
        for name, shape in {
            "attn_norm": (_SIZE,), "ffn_norm": (_SIZE,), "attn_q": (_SIZE, _SIZE), "attn_k": (_SIZE // 2, _SIZE),
            "attn_v": (_SIZE // 2, _SIZE), "attn_output": (_SIZE, _SIZE), "ffn_gate": (_INNER, _SIZE),
            "ffn_up": (_INNER, _SIZE), "ffn_down": (_SIZE, _INNER),
        }.items():  # fmt: skip
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
