"""Small model descriptions for the pure tests."""

from __future__ import annotations

from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, Where

FIRST, LAST, LAST_IF_SPLIT = Home(Where.FIRST), Home(Where.LAST), Home(Where.LAST_IF_SPLIT)


def parameter(name: str, shape: tuple[int, ...], dim: int | None, home: Home, **more: object) -> ParameterSpec:
    """One parameter that is one logical tensor of the same name."""
    return ParameterSpec(name, (Segment(name, shape, dim),), home, dtype=str(more.pop("dtype", "float32")), **more)


def layer(number: int, hidden: int, ffn: int, dtype: str) -> list[ParameterSpec]:
    """A transformer layer without biases: RMSNorm, fused QKV by rows, SwiGLU."""
    home, path = Home(Where.LAYER, number), f"decoder.layers.{number}"
    return [
        parameter(f"{path}.input_layernorm.weight", (hidden,), None, home, dtype=dtype),
        parameter(f"{path}.self_attention.linear_proj.weight", (hidden, hidden), 1, home, dtype=dtype),
        parameter(f"{path}.self_attention.linear_qkv.weight", (3 * hidden, hidden), 0, home, dtype=dtype),
        parameter(f"{path}.pre_mlp_layernorm.weight", (hidden,), None, home, dtype=dtype),
        parameter(f"{path}.mlp.linear_fc1.weight", (2, ffn, hidden), 1, home, dtype=dtype),
        parameter(f"{path}.mlp.linear_fc2.weight", (hidden, ffn), 1, home, dtype=dtype),
    ]


def dense_model(
    layers: int = 4, hidden: int = 32, ffn: int = 8, vocab: int = 64, *, tied: bool = False, dtype: str = "float32"
) -> ModelDescription:
    """The small model of the cases: untied unless said, no biases."""
    embedding = "embedding.word_embeddings.weight"
    specs = [parameter(embedding, (vocab, hidden), 0, FIRST, dtype=dtype, shared_embedding=tied)]
    for number in range(layers):
        specs += layer(number, hidden, ffn, dtype)
    specs.append(parameter("decoder.final_layernorm.weight", (hidden,), None, LAST, dtype=dtype))
    key = embedding if tied else "output_layer.weight"
    specs.append(
        ParameterSpec(
            "output_layer.weight",
            (Segment(key, (vocab, hidden), 0),),
            LAST_IF_SPLIT if tied else LAST,
            dtype=dtype,
            shared_embedding=tied,
        )
    )
    return ModelDescription(tuple(specs), num_layers=layers)


def moe_model(
    layers: int = 4, experts: int = 4, hidden: int = 8, ffn: int = 8, *, dtype: str = "float32"
) -> ModelDescription:
    """MoE layers with a router, its fp32 bias buffer, a shared expert and gated experts."""
    specs = [parameter("embedding.word_embeddings.weight", (16, hidden), 0, FIRST, dtype=dtype)]
    for number in range(layers):
        home, path = Home(Where.LAYER, number), f"decoder.layers.{number}.mlp"
        specs.append(parameter(f"{path}.router.weight", (experts, hidden), None, home))
        specs.append(parameter(f"{path}.router.expert_bias", (experts,), None, home, is_buffer=True, trainable=False))
        for expert in range(experts):
            for name, shape, dim in (("linear_fc1", (2, ffn, hidden), 1), ("linear_fc2", (hidden, ffn), 1)):
                key = f"{path}.experts.local_experts.{expert}.{name}.weight"
                specs.append(parameter(key, shape, dim, home, dtype=dtype, expert=expert))
        specs.append(parameter(f"{path}.shared_experts.linear_fc1.weight", (2, ffn, hidden), 1, home, dtype=dtype))
    specs.append(parameter("output_layer.weight", (16, hidden), 0, LAST, dtype=dtype))
    return ModelDescription(tuple(specs), num_layers=layers, num_experts=experts)
