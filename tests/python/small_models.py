# SPDX-License-Identifier: Apache-2.0
"""Small Transformers models of the kinds whose attention differs: GQA, softcap and windows, sinks."""

import transformers


def configs(sizes: dict, *, window: int, experts_per_token: int) -> dict:
    """Functions that make a configuration, by kind; ``sizes``: what all of them take."""
    return {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes, sliding_window=window, attn_logit_softcapping=3.0,
            query_pre_attn_scalar=sizes["head_dim"],
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **sizes, sliding_window=window, num_local_experts=2,
            num_experts_per_tok=experts_per_token,
        ),
    }  # fmt: skip
