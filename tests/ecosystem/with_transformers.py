"""transformers: models made from small configurations, ``fully_shard`` on each block."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ecosystem.training import VOCAB, language_loss, scenario, token_ids, train
from support.arms import Run, Scenario

PACKAGES = ("transformers",)
IMPORTS = (
    "transformers.generation.utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.t5.modeling_t5",
)

# Special tokens: none, so that generate() never stops early.
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **NO_TOKENS,
}


def llama(**config) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **config}))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def checkpointed_llama() -> nn.Module:
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    )


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, **NO_TOKENS)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, **NO_TOKENS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Decoder layers, or T5's blocks, by the lists that hold them."""
    return [
        block
        for name, child in model.named_modules()
        if name.rpartition(".")[2] in ("layers", "h", "block")
        for block in child
    ]


def sharded(*mesh: int, **kwargs) -> Callable[[Run], None]:
    def shard(run: Run) -> None:
        run.fully_shard(*blocks(run.module), run.module, mesh=run.mesh(*(mesh or (1,))), **kwargs)

    return shard


def generate(inside: Callable, unshard: bool = False) -> Callable[[Run, int], None]:
    def between(run: Run, step: int) -> None:
        run.module.eval()
        if unshard and run.fsdp:
            run.module.unshard()
        prompt = token_ids(run, 100 + step, 2, 4)
        with inside():
            run.record(
                f"{step}/generated",
                run.module.generate(prompt, max_new_tokens=4, do_sample=step % 2 == 1),
            )
        run.module.train()

    return between


class Node(torch.autograd.Function):
    """One node for all inputs of a block, as FSDP2 puts one there for its post-backward."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return grads


def with_nodes(run: Run) -> None:
    """FSDP2's node changes the order in which the gradients of T5's encoder output are summed."""

    def before(module, args, kwargs):
        values = [*args, *kwargs.values()]
        places = [i for i, x in enumerate(values) if torch.is_tensor(x) and x.requires_grad]
        if places:
            for i, x in zip(places, Node.apply(*(values[i] for i in places))):
                values[i] = x
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))

    for block in blocks(run.module):
        block.register_forward_pre_hook(before, with_kwargs=True)


def _scenario(name: str, model: Callable[[], nn.Module], *mesh: int, **kwargs) -> Scenario:
    if mesh:
        kwargs |= {"world": mesh[0], "replicas": mesh[0]}
    kwargs.setdefault("steps", train())
    kwargs.setdefault("shard", sharded(*mesh))
    return scenario("transformers", name, model=model, **kwargs)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

SCENARIOS = [
    _scenario("Llama", llama),
    _scenario("Llama, (2, 1) mesh", llama, 2, 1),
    _scenario("Llama, accumulation", llama, steps=train(micro=2)),
    _scenario("Llama, bf16", llama, shard=sharded(mp_policy=MIXED), like_plain=False),
    _scenario("Llama, tied embeddings", tied_llama),
    _scenario("Llama, checkpointing and dropout", checkpointed_llama),
    _scenario("Llama, kept after forward", llama, shard=sharded(reshard_after_forward=False)),
    _scenario("Llama, generate", llama, steps=train(between=generate(torch.no_grad))),
    _scenario("Llama, generate, inference mode", llama,
              steps=train(between=generate(torch.inference_mode))),
    _scenario("Mixtral", mixtral, steps=train(between=generate(torch.no_grad))),
    _scenario("Qwen3-MoE", qwen3_moe),
    _scenario("GPT-2, dropout", gpt2, steps=train(between=generate(torch.inference_mode))),
    # generate() calls T5's encoder by itself, past the root's hooks.
    _scenario("T5", t5, plain=with_nodes,
              steps=train(between=generate(torch.no_grad, unshard=True))),
    _scenario("T5, (2, 1) mesh", t5, 2, 1, plain=with_nodes),
]  # fmt: skip
